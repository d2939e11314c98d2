"""Time that one layer's keys or values take in each format of the KV cache: rows gathered, rows written.

    PYTHONPATH=. python benchmarks/kv_speed.py                 # needs a GPU
    PYTHONPATH=. python benchmarks/kv_speed.py --device cpu    # the same calls in plain torch, each once, as a rehearsal

The same rows every time, so the small cases come from the L2 cache. The ring holds the first 8,192 slots. bf16 and fp8 are SGLang's
own caches on a GPU: they are written by torch (fp8 cut at 448 first) and read by the kernel with which SGLang gathers a prompt's context,
keys and values in one launch, of which half is the time; without SGLang, and on a CPU, by index_select.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable

import torch

from q38.kernels.timing import graph_time
from q38.kvcache.layout import TIERED, KvLayout
from q38.kvcache.pool import KvPool

HEADS, DIM, RING = 2, 256, 8192
PLAIN = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
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
    for name in (*PLAIN, "int8", TIERED, "int4"):
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
        if name in PLAIN and not what.startswith("write") and (pack := sglangs_gather()):
            found[-1] = (f"{what} (SGLang's)", seconds(pack_call(pack, name, slots, at), device) / 2)
    return found


Call = Callable[[torch.Tensor, torch.Tensor], object]  # (slots [n], rows [n, heads, dim])


def calls(name: str, slots: int, device: str) -> tuple[Call, Call]:
    """Write rows, and gather into rows, of a pool of one layer's values."""
    if name in PLAIN:
        cache = torch.zeros(slots, HEADS, DIM, dtype=torch.bfloat16, device=device).to(PLAIN[name])
        # Eight bits without a type: torch moves no fp8 rows.
        raw = cache.view(torch.uint8) if cache.itemsize == 1 else cache
        return (
            lambda at, rows: raw.index_copy_(0, at, as_stored(rows, cache.dtype).view(raw.dtype)),
            lambda at, rows: rows.copy_(torch.index_select(raw, 0, at).view(cache.dtype)),
        )
    pool = KvPool(KvLayout(name, 1, HEADS, DIM, RING if name == TIERED else 0), slots, device=device)
    side = pool.rows[0]["v"]
    # Keys stamp the ring's places and values follow them, so the time of a layer's values is the shorter one.
    return (
        lambda at, rows: pool._write(side, at, rows, stamp=True),
        lambda at, rows: pool.gather(0, "v", at, rows),
    )


def as_stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return rows if rows.dtype == dtype else rows.clamp(-448, 448).to(dtype)


def sglangs_gather() -> Callable[..., object] | None:
    """pack_qsa_prefill_kv, where there is a GPU for it."""
    try:
        sparse = importlib.import_module("sglang.srt.layers.attention.qsa.sparse_attn")
    except ImportError:
        return None
    return sparse.pack_qsa_prefill_kv if torch.cuda.is_available() else None  # type: ignore[no-any-return]


def pack_call(pack: Callable[..., object], name: str, slots: int, at: torch.Tensor) -> Callable[[], object]:
    """Keys and values of one request whose context lies in the slots `at`, [n, heads, dim] each in bf16."""
    k, v = torch.randn(2, slots, HEADS, DIM, device=at.device, dtype=torch.bfloat16).to(PLAIN[name])
    table, zero = at.int()[None], torch.zeros(1, dtype=torch.int32, device=at.device)
    ends = torch.tensor([0, len(at)], dtype=torch.int32, device=at.device)
    return lambda: pack(
        k=k, v=v, req_to_token=table, req_indices=zero, cu_k=ends, total_k=len(at), max_k=len(at), output_dtype=torch.bfloat16
    )  # fmt: skip


def seconds(call: Callable[[], object], device: str) -> float:
    if device == "cuda":
        return graph_time([call] * 10)
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
