"""q38: Qwen3.8-Flash-Next from its bf16 checkpoint to a server on one 24 GB GPU."""

__version__ = "0.1.0"
