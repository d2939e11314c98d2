"""The command line: one file per verb, each parses, calls one function and prints."""
