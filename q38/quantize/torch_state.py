"""Torch as a reproducible run needs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_dtype(device: str) -> torch.dtype:
    """float32 on the CPU, where bfloat16 is slow without the instructions and differs with them; else bfloat16."""
    return torch.float32 if device == "cpu" else torch.bfloat16


@contextmanager
def fixed_torch(threads: int) -> Iterator[None]:
    """A fixed number of threads and deterministic kernels for the body; what was before is restored."""
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
