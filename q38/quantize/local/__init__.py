"""Experts tuned one by one, each on the tokens that are routed to it."""
