"""Errors, settings and progress: what every other folder may use, and that uses none of them."""
