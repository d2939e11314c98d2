"""Speed of a running OpenAI-compatible server, and whether it became slower."""
