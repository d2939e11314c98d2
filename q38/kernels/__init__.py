"""Triton kernels, each beside a plain torch reference; the tuner."""
