# ruff: noqa: B023, BLE001, T201  (a script; every call runs within its iteration)
"""Correctness and speed of the prefill, INT8, KV and row-moving kernels at real size.

python benchmarks/kernels_others.py [prefill] [sort] [int8] [kv] [rows]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from q38.kernels import kv_cache, kv_formats, reference
from q38.kernels.gemv_int8 import GemvInt8
from q38.kernels.moe_prefill import PrefillConfig, moe_prefill
from q38.kernels.moe_prefill_cuda import HopperConfig, MmaConfig
from q38.kernels.moe_sort import sort_slots, sort_slots_torch
from q38.kernels.row_mover import RowMover, gather_addresses
from q38.kernels.samples import random_rows, row_addresses, uniform_routing
from q38.kernels.timing import copy_rate, event_time, graph_time, link_rate, matmul_rate
from q38.residency.layout import ExpertLayout

HIDDEN, INTER, EXPERTS, TOP_K = 2560, 640, 512, 10
T0 = time.monotonic()
PREFILL = (
    ("blocks of 64", HopperConfig(64, 2, 2, 1, 2, 4)), ("64, 3 stages", HopperConfig(64, 2, 2, 1, 2, 3)),
    ("blocks of 80", HopperConfig(80, 2, 2, 1, 2, 3)), ("blocks of 96", HopperConfig(96, 2, 2, 1, 2, 3)),
    ("mma", MmaConfig()), ("triton", PrefillConfig()),
)  # fmt: skip


def log(*parts: object) -> None:
    print(f"[{time.monotonic() - T0:5.1f}]", *parts, flush=True)


def prefill() -> None:
    layout = ExpertLayout(HIDDEN, INTER)
    rows = random_rows(layout, EXPERTS)
    table = row_addresses(rows).cuda()
    rate = matmul_rate()
    log(f"bf16 matmul {rate / 1e12:.0f} TFLOP/s")
    ids, weights = uniform_routing(64, 48, TOP_K)
    for dtype, backend in ((torch.bfloat16, "cuda"), (torch.float16, "cuda"), (torch.bfloat16, "triton")):
        x = torch.randn(64, HIDDEN, device="cuda").to(dtype)
        out = moe_prefill(x, table, ids, weights, layout, backend=backend)
        exact = reference.moe(x, list(rows[:48]), ids, weights, layout, torch.float16)
        log(
            "prefill",
            dtype,
            "relative error",
            f"{reference.relative_error(out, exact):.2e}",
            "same bits",
            torch.equal(out, moe_prefill(x, table, ids, weights, layout, backend=backend)),
        )
    x = torch.randn(64, HIDDEN, device="cuda").bfloat16()
    for stages in (1, 2, 3):
        config = PrefillConfig(stages=stages)
        outs = [moe_prefill(x, table, ids, weights, layout, config=config) for _ in range(20)]
        same = all(torch.equal(o, outs[0]) for o in outs)
        log(f"prefill triton stages={stages}: same bits in 20 calls {same}")
    for m in (256, 1024, 4096, 16384):
        ids, weights = uniform_routing(m, EXPERTS, TOP_K)
        x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
        work = 2 * m * TOP_K * 3 * HIDDEN * INTER
        line = []
        for name, config in PREFILL:
            s = graph_time(
                [lambda: moe_prefill(x, table, ids, weights, layout, config=config)] * 3, replays=5
            )
            line.append(f"{name} {s * 1e6:.0f} us {work / s / 1e12:.0f} TFLOP/s ({work / s / rate:.2f})")
        log(f"prefill M={m}", *line)


def sort() -> None:
    for m in (300, 4096, 16384):
        ids, _ = uniform_routing(m, EXPERTS, TOP_K)
        ours, torch_sort = (
            graph_time([lambda: f(ids, EXPERTS, 64)] * 3) * 1e6 for f in (sort_slots, sort_slots_torch)
        )
        log(f"sort M={m}: {ours:.1f} us; torch operations {torch_sort:.1f} us")


def int8() -> None:
    copy = copy_rate()
    for k, n, group in ((10240, 320, 128), (320, 10240, 64), (2560, 512, 128)):
        count = max(2, int(3e8 / (k * n)))
        mats = [
            torch.randint(-(2**31), 2**31 - 1, (k // 4, n), dtype=torch.int32, device="cuda")
            for _ in range(count)
        ]
        scales = [(torch.randn(k // group, n, device="cuda") * 0.01).half() for _ in range(count)]
        dense = [torch.randn(n, k, device="cuda").bfloat16() for _ in range(count)]
        for m in (1, 16):
            x = torch.randn(m, k, device="cuda").bfloat16()
            calls = [GemvInt8(w, s) for w, s in zip(mats, scales, strict=True)]
            s = graph_time([lambda g=g: g(x) for g in calls], replays=5)
            c = calls[0].config
            old = [GemvInt8(w, s, backend="triton") for w, s in zip(mats, scales, strict=True)]
            slow = graph_time([lambda g=g: g(x) for g in old], replays=5)
            g = calls[0]
            error = reference.relative_error(g(x), reference.gemv_int8(x, mats[0], scales[0]))
            t = graph_time([lambda d=d: torch.nn.functional.linear(x, d) for d in dense], replays=5)
            log(
                f"int8 {k}x{n} M={m}: {c} {s * 1e6:.2f} us {k * n / s / 1e9:.0f} GB/s ({k * n / s / copy * 1:.2f} of copy); Triton {slow * 1e6:.2f} us; bf16 torch {t * 1e6:.2f} us; error {error:.1e}; same bits {torch.equal(g(x), g(x))}"
            )


def kv() -> None:
    copy = copy_rate()
    heads, dim, pool = 2, 256, 262144
    for fmt in (kv_formats.INT8_G64, kv_formats.INT4_G32):
        payload, scales = fmt.payload(pool, heads, dim, "cuda"), fmt.scales(pool, heads, dim, "cuda")
        rows = (torch.randn(4096, heads, dim, device="cuda") * 3).bfloat16()
        slots = torch.randperm(pool, device="cuda")[:4096]
        kv_cache.write_rows(rows, slots, payload, scales, fmt)
        want = kv_formats.quantize_reference(rows, fmt)
        exact = torch.equal(payload[slots], want[0]) and torch.equal(scales[slots], want[1])
        out = torch.empty(4096, heads, dim, device="cuda", dtype=torch.bfloat16)
        kv_cache.gather_rows(slots, payload, scales, fmt, out)
        exact_read = torch.equal(out, kv_formats.dequantize_reference(*want, fmt, torch.bfloat16))
        w = event_time(lambda: kv_cache.write_rows(rows, slots, payload, scales, fmt))
        per = heads * dim * fmt.bits / 8 + heads * dim / fmt.group * 2
        log(f"kv {fmt.name} write exact {exact}, read exact {exact_read}; write 4096 rows {w * 1e6:.1f} us")
        for n, contiguous in ((2051, False), (131072, True), (131072, False)):
            s = torch.arange(n, device="cuda") if contiguous else torch.randperm(pool, device="cuda")[:n]
            out = torch.empty(n, heads, dim, device="cuda", dtype=torch.bfloat16)
            for backend in ("cuda", "triton"):
                t = graph_time(
                    [lambda: kv_cache.gather_rows(s, payload, scales, fmt, out, backend=backend)] * 12
                )
                moved = n * (per + heads * dim * 2)
                log(
                    f"kv {fmt.name} gather n={n} contiguous={contiguous} {backend}: {t * 1e6:.2f} us {moved / t / 1e9:.0f} GB/s ({moved / t / copy:.2f} of copy)"
                )
    tiers = kv_cache.KvTiers(pool, heads, dim, 8192)
    slots = torch.randperm(pool, device="cuda")[:4096]
    kv_cache.write_rows_tiered(rows, slots, tiers)
    out = torch.empty(4096, heads, dim, device="cuda", dtype=torch.bfloat16)
    kv_cache.gather_rows_tiered(slots, tiers, out)
    hot = tiers.owner[slots % 8192] == slots
    q8, q4 = (
        kv_formats.dequantize_reference(*kv_formats.quantize_reference(rows, f), f, torch.bfloat16)
        for f in (kv_formats.INT8_G64, kv_formats.INT4_G32)
    )
    log(
        "kv tiered exact",
        torch.equal(out, torch.where(hot[:, None, None], q8, q4)),
        f"hot {float(hot.float().mean()):.2f}",
    )


def rows() -> None:
    layout = ExpertLayout(HIDDEN, INTER)
    link, copy = link_rate(), copy_rate()
    host = random_rows(layout, 512, pinned=True)
    target = torch.empty(256, layout.row_bytes, dtype=torch.uint8, device="cuda")
    for count in (1, 4, 16, 64, 256):
        picked = torch.randperm(512)[:count].tolist()
        places = list(range(count))
        line = []
        for batched in (True, False):
            mover = RowMover(batched=batched)

            def call(mover: RowMover = mover) -> None:
                event = mover.copy(host, picked, target, places)
                torch.cuda.current_stream().wait_event(event)

            s = event_time(call)
            same = torch.equal(target[:count].cpu(), host[picked])
            line.append(
                f"{'batch' if mover.batched else 'async'} {s * 1e6:.0f} us {count * layout.row_bytes / s / 1e9:.1f} GB/s ({count * layout.row_bytes / s / link:.2f}) {same}"
            )
        addresses = row_addresses(host)[picked].cuda()
        for block, warps in ((512, 4), (2048, 8)):
            s = event_time(lambda: gather_addresses(addresses, target[:count], block=block, warps=warps))
            line.append(
                f"kernel {block} {s * 1e6:.0f} us {count * layout.row_bytes / s / 1e9:.1f} GB/s ({count * layout.row_bytes / s / link:.2f}) {torch.equal(target[:count].cpu(), host[picked])}"
            )
        log(f"rows host to device {count}:", *line)
    pool = random_rows(layout, 2048)
    addresses = row_addresses(pool)[torch.randperm(2048)[:256]].cuda()
    for block, warps in ((512, 4), (1024, 4), (2048, 8)):
        s = event_time(lambda: gather_addresses(addresses, target, block=block, warps=warps))
        log(
            f"rows device gather 256 block {block}: {2 * target.numel() / s / 1e9:.0f} GB/s ({2 * target.numel() / s / copy:.2f} of copy)"
        )


if __name__ == "__main__":
    torch.manual_seed(0)
    for name in sys.argv[1:] or ("prefill", "sort", "int8", "kv", "rows"):
        try:
            globals()[name]()
        except Exception as error:
            import traceback

            traceback.print_exc(limit=4)
            log(name, "FAILED", repr(error)[:300])
