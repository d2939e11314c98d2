"""transformers: loading a source or packed Qwen4-Exp checkpoint with the n-gram table left on disk."""
