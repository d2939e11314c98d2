"""What a person would notice of a server, checked through its API: one behaviour per file, listed in `registry`."""
