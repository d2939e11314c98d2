# ruff: noqa: B023, T201  (a script; every call runs within its iteration)
"""Correctness and speed of the decode kernels at real size, several geometries in one process.

    python benchmarks/kernels_decode.py OUT [--layers 24] [--sections check,device,host,counts]

Prints a table of microseconds per layer; OUT/decode.json holds all figures.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from q38.kernels import reference
from q38.kernels.moe_decode import DecodeConfig, MoeDecode
from q38.kernels.samples import random_rows, row_addresses, uniform_routing
from q38.kernels.timing import copy_rate, graph_time, link_rate
from q38.residency.layout import ExpertLayout

HIDDEN, INTER, EXPERTS, TOP_K = 2560, 640, 512, 10


def log(*parts: object) -> None:
    print(f"[{time.monotonic() - T0:6.1f}]", *parts, flush=True)


def check(layout: ExpertLayout, rows: torch.Tensor, table: torch.Tensor) -> None:
    for dtype, m, backend in itertools.product(
        (torch.bfloat16, torch.float16), (1, 3, 16), ("cuda", "triton")
    ):
        moe = MoeDecode(layout, TOP_K, dtype=dtype, backend=backend)
        x = torch.randn(m, HIDDEN, device="cuda").to(dtype)
        ids, weights = uniform_routing(m, 64, TOP_K, seed=m)  # 64 experts: many shared by several tokens
        out = moe(x, table, ids, weights, torch.full_like(x, float("nan")))
        exact = reference.moe(x, list(rows[:64]), ids, weights, layout, torch.float16)
        again = moe(x, table, ids, weights)
        log(
            f"check {backend} {dtype} M={m}: relative error {reference.relative_error(out, exact):.2e},"
            f" fp32 h {float(moe.hidden_state[: m * TOP_K].abs().max()):.3f}, same bits {torch.equal(out, again)}"
        )


def device(
    layout: ExpertLayout, tables: list[torch.Tensor], configs: list[tuple[str, DecodeConfig | None]]
) -> None:
    layers = len(tables)
    for name, config in configs:
        started = time.monotonic()
        backend = "triton" if config is None else "cuda"
        try:
            moe = MoeDecode(layout, TOP_K, configs=config and {1: config}, backend=backend)
        except RuntimeError as error:
            log(name, "failed", str(error)[:300])
            continue
        line = [name]
        for m in ARGS.tokens:
            routing = [uniform_routing(m, EXPERTS, TOP_K, seed=i) for i in range(layers)]
            x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
            out = torch.empty_like(x)
            calls = [
                lambda table=table, r=r: moe(x, table, r[0], r[1], out)
                for table, r in zip(tables, routing, strict=True)
            ]
            seconds = graph_time(calls)
            distinct = sum(int(r[0].unique().numel()) for r in routing) / layers
            moved = distinct * layout.row_bytes
            RESULTS.append(
                {"name": name, "m": m, "us": seconds * 1e6, "rows": distinct, "GBs": moved / seconds / 1e9}
            )
            line.append(f"M={m} {seconds * 1e6:.2f} us ({moved / seconds / 1e9:.0f} GB/s)")
            if config and ARGS.parts:
                first = graph_time(
                    [
                        lambda t=t, r=r: moe.launch_for(m).gate_up(x, t, r[0], moe.hidden_state)
                        for t, r in zip(tables, routing, strict=True)
                    ]
                )
                second = graph_time(
                    [
                        lambda t=t, r=r: moe.launch_for(m).down(moe.hidden_state, t, r[0], r[1], out)
                        for t, r in zip(tables, routing, strict=True)
                    ]
                )
                line.append(f"= {first * 1e6:.2f} + {second * 1e6:.2f}")
        regs = f"registers {moe.launch_for(1).registers}" if config else ""
        log(*line, regs, f"[{time.monotonic() - started:.1f} s]")


def host(
    layout: ExpertLayout, tables: list[torch.Tensor], configs: list[tuple[str, DecodeConfig | None]]
) -> None:
    pinned = random_rows(layout, 640, pinned=True)
    addresses = row_addresses(pinned)
    for (name, config), share in itertools.product(configs, (0.16, 1.0)):
        moe = MoeDecode(layout, TOP_K, configs=config and {1: config}, backend="cuda")
        for m in (1, 4):
            routing = [uniform_routing(m, EXPERTS, TOP_K, seed=i) for i in range(len(tables))]
            cold, calls, on_host = [], [], 0
            x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
            out = torch.empty_like(x)
            generator = torch.Generator().manual_seed(1)
            for table, r in zip(tables, routing, strict=True):
                mixed = table.cpu().clone()
                used = r[0].unique().cpu()
                picked = used[torch.rand(used.numel(), generator=generator) < share].long()
                mixed[picked] = addresses[torch.randperm(640, generator=generator)[: picked.numel()]]
                on_host += picked.numel()
                cold.append(mixed.cuda())
                calls.append(lambda table=cold[-1], r=r: moe(x, table, r[0], r[1], out))
            seconds = graph_time(calls, replays=7)
            nbytes = on_host / len(tables) * layout.row_bytes
            link = nbytes / LIMITS["link_GBs"] * 1e-9
            RESULTS.append(
                {
                    "name": name,
                    "m": m,
                    "host": share,
                    "us": seconds * 1e6,
                    "link_us": link * 1e6,
                    "host_GBs": nbytes / seconds / 1e9,
                }
            )
            log(
                f"host {share:.0%} {name} M={m}: {seconds * 1e6:.1f} us, link alone {link * 1e6:.1f}, {nbytes / seconds / 1e9:.1f} GB/s"
            )


def host_counts(layout: ExpertLayout, tables: list[torch.Tensor]) -> None:
    """The same number of host rows in every layer, words through registers and by cp.async."""
    pinned = random_rows(layout, 640, pinned=True)
    addresses, generator = row_addresses(pinned), torch.Generator().manual_seed(1)
    ways = {
        name: MoeDecode(layout, TOP_K, configs={1: DecodeConfig(batch=1, registers=way)}, backend="cuda")
        for name, way in (("registers", True), ("cp.async", False))
    }
    for m, count in ((1, 0), (1, 1), (1, 2), (1, 4), (1, 10), (4, 6), (16, 22)):
        x = torch.randn(m, HIDDEN, device="cuda").bfloat16()
        out, layers = torch.empty_like(x), []
        for i, table in enumerate(tables):
            ids, weights = uniform_routing(m, EXPERTS, TOP_K, seed=i)
            used, mixed = ids.unique().cpu().long(), table.cpu().clone()
            picked = used[torch.randperm(len(used), generator=generator)[:count]]
            mixed[picked] = addresses[torch.randperm(640, generator=generator)[:count]]
            layers.append((mixed.cuda(), ids, weights))
        link = count * layout.row_bytes / LIMITS["link_GBs"] * 1e-3
        us = {
            name: graph_time([lambda layer=layer: moe(x, *layer, out) for layer in layers], replays=5) * 1e6
            for name, moe in ways.items()
        }
        RESULTS.append({"m": m, "host_rows": count, "link_us": link, **us})
        log(f"M={m}, {count} host rows: link alone {link:.1f} us,", {k: round(v, 1) for k, v in us.items()})


def configs() -> list[tuple[str, DecodeConfig | None]]:
    named: list[tuple[str, DecodeConfig | None]] = []
    for numbers in ARGS.geometry:  # tiles13, tiles2, ctas13, ctas2, depth13, depth2, batch
        named.append((f"cuda {','.join(map(str, numbers))}", DecodeConfig(*numbers)))
    if ARGS.no_pdl:
        named.append(("cuda 1,1,2,2 no pdl", DecodeConfig(dependent=False)))
    if ARGS.triton:
        named.append(("triton", None))
    return named


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--sections", default="check,device,host")
    parser.add_argument("--tokens", type=lambda s: [int(v) for v in s.split(",")], default=[1, 4, 16])
    parser.add_argument(
        "--geometry",
        type=lambda s: [tuple(int(v) for v in g.split(",")) for g in s.split()],
        default=[(1, 1, 2, 2, 2, 5, 1)],
    )
    parser.add_argument("--triton", action="store_true")
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--no-pdl", action="store_true")
    ARGS = parser.parse_args()
    T0 = time.monotonic()
    RESULTS: list[dict[str, object]] = []
    LIMITS: dict[str, float] = {}
    torch.manual_seed(0)
    layout = ExpertLayout(HIDDEN, INTER)
    sections = ARGS.sections.split(",")
    pool = random_rows(layout, ARGS.layers * EXPERTS)
    tables = list(row_addresses(pool).cuda().view(ARGS.layers, EXPERTS))
    LIMITS = {"copy_GBs": copy_rate() / 1e9, "link_GBs": link_rate() / 1e9}
    log("pool ready", LIMITS, torch.cuda.get_device_properties(0).multi_processor_count, "SMs")
    if "check" in sections:
        check(layout, pool, tables[0])
    if "device" in sections:
        device(layout, tables, configs())
    if "host" in sections:
        host(layout, tables, [c for c in configs() if c[1] is not None][:2])
    if "counts" in sections:
        host_counts(layout, tables)
    (ARGS.out / f"decode-{torch.cuda.get_device_properties(0).multi_processor_count}.json").write_text(
        json.dumps({"limits": LIMITS, "results": RESULTS}, indent=1)
    )
