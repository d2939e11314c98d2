# ruff: noqa: T201  (a script)
"""Relative error of each KV cache format on random rows: the figures of docs/kv.md.

    python benchmarks/kv_error.py

Two kinds of rows of 2 heads x 256 channels: normal, and normal with channels of unequal size, whose largest RMS is
4.8 times the median one (REPORTED for keys of the release after their norm: 2.9 to 6.6).
"""

from __future__ import annotations

import torch

from q38.kvcache.layout import ROWS, TIERED, KvLayout
from q38.kvcache.pool import KvPool, gather_many

HEADS, DIM, TOKENS = 2, 256, 8192
RING = TOKENS // 4


def main() -> None:
    """Print a line a format."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(TOKENS, HEADS, DIM, generator=generator)
    sizes = torch.exp(0.6 * torch.randn(HEADS, DIM, generator=generator))
    uneven = normal * sizes
    print(f"largest channel RMS over median: {float(sizes.max() / sizes.median()):.1f}")
    for name in ROWS:
        pool = KvPool(KvLayout(name, 1, HEADS, DIM, RING if name == TIERED else 0), TOKENS)
        slots = torch.arange(TOKENS)
        pool.write(0, slots, normal.bfloat16(), uneven.bfloat16())
        found = gather_many(pool, 0, slots, torch.float32)
        errors = [
            float((got - rows.bfloat16()).norm() / rows.norm())
            for got, rows in zip(found, (normal, uneven), strict=True)
        ]
        print(f"{name:14s} normal {100 * errors[0]:5.2f} %  uneven {100 * errors[1]:5.2f} %")


if __name__ == "__main__":
    main()
