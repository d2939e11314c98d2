"""Quantized KV cache: what a token takes in each format, where its bytes lie, and the memory behind them."""
