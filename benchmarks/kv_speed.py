"""Time that one layer's keys or values take in each format of the KV cache: rows gathered, rows written.

    PYTHONPATH=. python benchmarks/kv_speed.py                 # needs a GPU
    PYTHONPATH=. python benchmarks/kv_speed.py --device cpu    # the same calls in plain torch, each once, as a rehearsal

The same rows every time, so the small cases come from the L2 cache. The ring holds the first 8,192 slots. bf16 is torch's index_select
and index_copy; fp8 on a GPU is SGLang's own cache and not measured here.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

import torch

from q38.kernels.timing import graph_time
from q38.kvcache.layout import TIERED, KvLayout
from q38.kvcache.pool import KvPool

HEADS, DIM, RING = 2, 256, 8192
CASES = (  # rows, whether their slots are in order; the last two are a decode step and a long prefix
    ("write 1", 1, True), ("write 2,048", 2048, True), ("gather 2,051", 2051, False), ("gather 131,072", 131_072, True)
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--slots", type=int, default=262_144)
    arguments = parser.parse_args()
    for name in ("bf16", "int8", TIERED, "int4"):
        figures = [
            f"{what} {seconds * 1e6:.1f} us"
            for what, seconds in measure(name, arguments.slots, arguments.device)
        ]
        sys.stdout.write(f"{name}: {', '.join(figures)}\n")
        sys.stdout.flush()


def measure(name: str, slots: int, device: str) -> list[tuple[str, float]]:
    """Seconds of each case."""
    write, gather = calls(name, slots, device)
    generator = torch.Generator().manual_seed(0)
    write(torch.arange(RING, device=device), torch.randn(RING, HEADS, DIM, device=device).bfloat16())
    every = torch.randperm(slots, generator=generator)
    found = []
    for what, n, in_order in CASES:
        at = (torch.arange(n) if in_order else every[:n]).to(device)
        rows = torch.randn(n, HEADS, DIM, generator=generator).to(device, torch.bfloat16)
        call = write if what.startswith("write") else gather
        found.append((what, seconds(lambda call=call, at=at, rows=rows: call(at, rows), device)))
    return found


Call = Callable[[torch.Tensor, torch.Tensor], object]  # (slots [n], rows [n, heads, dim])


def calls(name: str, slots: int, device: str) -> tuple[Call, Call]:
    """Write rows, and gather into rows, of a pool of one layer's values."""
    if name == "bf16":
        cache = torch.zeros(slots, HEADS, DIM, dtype=torch.bfloat16, device=device)
        return (
            lambda at, rows: cache.index_copy_(0, at, rows),
            lambda at, rows: torch.index_select(cache, 0, at, out=rows),
        )
    pool = KvPool(KvLayout(name, 1, HEADS, DIM, RING if name == TIERED else 0), slots, device=device)
    side = pool.rows[0]["v"]
    # Keys stamp the ring's places and values follow them, so the time of a layer's values is the shorter one.
    return (
        lambda at, rows: pool._write(side, at, rows, stamp=True),
        lambda at, rows: pool.gather(0, "v", at, rows),
    )


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        return graph_time([call] * 10)
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
