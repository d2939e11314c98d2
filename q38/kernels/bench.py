"""What each kernel reaches at a model's real sizes, beside the limit measured in the same run.

Limits: device copy (bytes read plus written) for kernels that move memory, pinned copy for rows on the
host, a square bf16 matrix product for the prefill tile. Cold: a graph over many layers whose rows
exceed the L2 cache; hot: one layer again and again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from q38.base.progress import SILENT, Progress
from q38.kernels.configs import Tuned, shipped
from q38.kernels.tune import Workload, require_gpu

DECODE_TOKENS = (1, 4, 16)
PREFILL_TOKENS = (256, 1024, 4096)
INT8_TOKENS = (1, 16)


@dataclass(frozen=True)
class Measurement:
    """One line of the report. rate is bytes or operations per second, limit the same, fraction rate / limit."""

    kernel: str
    case: str
    tokens: int
    us: float
    work: float
    unit: str
    rate: float
    limit: float

    @property
    def fraction(self) -> float:
        return self.rate / self.limit

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "fraction": self.fraction}


def bench_kernels(
    workload: Workload,
    *,
    heads: int,
    dim: int,
    host_share: float = 0.16,
    tuned: Tuned | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure every kernel. Needs the rows of the timed layers in device memory, and 640 rows pinned.

    Args:
        workload: the MoE layer, the INT8 matrices, and a routing trace if there is one.
        heads, dim: KV heads and channels a head, for the KV kernels.
        host_share: fraction of the selected rows that the mixed case keeps in host memory.
        tuned: launch geometry; absent, the shipped file for this device, then defaults.

    Returns:
        device, triton, limits (GB/s and TFLOP/s), routing, and the measurements.

    Raises:
        ResourceError: there is no CUDA GPU, or no Triton.
    """
    device, version = require_gpu()
    from q38.kernels import timing

    tuned = tuned or shipped(device)
    limits = {"copy": timing.copy_rate(), "link": timing.link_rate(), "matmul": timing.matmul_rate()}
    parts: tuple[Callable[..., Iterator[Measurement]], ...] = (_decode, _prefill, _int8, _kv, _rows)
    found: list[Measurement] = []
    with progress.task("measuring kernels", len(parts), "kernels") as task:
        for part in parts:
            task.note(part.__name__.strip("_"))
            found.extend(part(workload, limits, tuned, (heads, dim, host_share)))
            task.advance(1)
    return {
        "device": device,
        "triton": version,
        "routing": "synthetic uniform" if workload.routing is None else "trace",
        "tuned": tuned.device if tuned else None,
        "limits": {
            "copy_GBs": limits["copy"] / 1e9,
            "link_GBs": limits["link"] / 1e9,
            "matmul_TFLOPs": limits["matmul"] / 1e12,
        },
        "results": [m.to_dict() for m in found],
    }


def _decode(w: Workload, limits: dict[str, float], tuned: Tuned | None, rest: Any) -> Iterator[Measurement]:
    from q38.kernels.moe_decode import DecodeConfig, MoeDecode
    from q38.kernels.samples import random_rows, row_addresses
    from q38.kernels.timing import graph_time
    from q38.kernels.tune import Bench

    bench, layout, share = Bench(w), w.layout, rest[2]
    pinned = random_rows(layout, 640, pinned=True)
    host_rows = row_addresses(pinned)
    generator = torch.Generator().manual_seed(1)
    for tokens in DECODE_TOKENS:
        entry = tuned.find("decode", w.moe_shape, tokens) if tuned else None
        configs = {tokens: DecodeConfig(**entry.config)} if entry else None
        x = torch.randn(tokens, layout.hidden, device="cuda").bfloat16()
        out = torch.empty_like(x)
        routes = [bench.routing(tokens, i) for i in range(len(bench.tables))]
        distinct = [torch.unique(r[0][r[0] >= 0]) for r in routes]
        nbytes = sum(d.numel() for d in distinct) / len(distinct) * layout.row_bytes
        line = partial(_line, "decode", unit="B", tokens=tokens)
        best = MoeDecode(layout, w.top_k, configs=configs)
        for moe in (best, MoeDecode(layout, w.top_k, backend="triton")):
            s = graph_time([partial(moe, x, t, *r, out) for t, r in zip(bench.tables, routes, strict=True)])
            yield line(f"device rows, cold, {moe.backend}", s, nbytes, limits["copy"])
        s = graph_time([partial(best, x, bench.tables[0], *routes[0], out)] * len(routes))
        hot = distinct[0].numel() * layout.row_bytes
        yield line(f"device rows, hot, {best.backend}", s, hot, limits["copy"])
        if tokens > 4:
            continue  # the link is the limit by far: two token counts show it
        moe = MoeDecode(layout, w.top_k, host_rows=True)
        for part in (share, 1.0):
            tables, count = [], 0
            for table, used in zip(bench.tables, distinct, strict=True):
                mixed = table.cpu().clone()
                picked = used.cpu()[torch.rand(used.numel(), generator=generator) < part].long()
                mixed[picked] = host_rows[torch.randperm(len(host_rows), generator=generator)[: len(picked)]]
                tables.append(mixed.cuda())
                count += len(picked)
            s = graph_time(
                [partial(moe, x, t, *r, out) for t, r in zip(tables, routes, strict=True)], replays=7
            )
            host_bytes = count / len(tables) * layout.row_bytes
            yield line(f"{part:.0%} of rows on the host, host bytes", s, host_bytes, limits["link"])


def _prefill(w: Workload, limits: dict[str, float], tuned: Tuned | None, rest: Any) -> Iterator[Measurement]:
    from q38.kernels.moe_prefill import PrefillConfig, config_of, moe_prefill
    from q38.kernels.samples import random_rows, row_addresses, uniform_routing
    from q38.kernels.timing import graph_time

    del rest
    layout = w.layout
    rows = random_rows(layout, w.experts)
    table = row_addresses(rows).cuda()
    for tokens in PREFILL_TOKENS:
        entry = tuned.find("prefill", w.moe_shape, tokens) if tuned else None
        config = config_of(entry.config) if entry else None
        ids, weights = uniform_routing(tokens, w.experts, w.top_k)
        x = torch.randn(tokens, layout.hidden, device="cuda").bfloat16()
        operations = 6 * tokens * w.top_k * layout.hidden * layout.intermediate
        for name, tile in (("best", config), ("Triton", PrefillConfig())):
            call = partial(moe_prefill, x, table, ids, weights, layout, config=tile)
            s = graph_time([call] * 3, replays=5)
            case = f"device rows, {name} backend"
            yield _line("prefill", case, s, operations, limits["matmul"], unit="FLOP", tokens=tokens)


def _int8(w: Workload, limits: dict[str, float], tuned: Tuned | None, rest: Any) -> Iterator[Measurement]:
    from q38.kernels.gemv_int8 import GemvInt8, Int8Config
    from q38.kernels.timing import graph_time

    del rest
    for k, n, group in w.int8:
        count = max(2, 2**28 // (k * n))
        words = torch.randint(-(2**31), 2**31 - 1, (count, k // 4, n), dtype=torch.int32, device="cuda")
        scales = (torch.randn(count, k // group, n, device="cuda") * 0.01).half()
        dense = torch.randn(count, n, k, device="cuda").bfloat16()
        nbytes = k * n + 2 * k // group * n
        for tokens in INT8_TOKENS:
            entry = tuned.find("int8", {"inputs": k, "outputs": n, "group": group}, tokens) if tuned else None
            config = Int8Config(**entry.config) if entry else None
            x = torch.randn(tokens, k, device="cuda").bfloat16()
            gemvs = [GemvInt8(a, b, config=config) for a, b in zip(words, scales, strict=True)]
            s = graph_time([partial(g, x) for g in gemvs])
            yield _line("int8", f"{k}x{n}, cold", s, nbytes, limits["copy"], unit="B", tokens=tokens)
            s = graph_time([partial(torch.nn.functional.linear, x, d) for d in dense])
            case = f"{k}x{n}, torch bf16 beside it"
            yield _line("int8", case, s, 2 * k * n, limits["copy"], unit="B", tokens=tokens)


def _kv(w: Workload, limits: dict[str, float], tuned: Tuned | None, rest: Any) -> Iterator[Measurement]:
    from q38.kernels import kv_cache
    from q38.kernels.timing import graph_time
    from q38.model.kv_format import INT4_G32, INT8_G64

    del w, tuned
    heads, dim, _ = rest
    pool = 2**18
    rows = torch.randn(1024, heads, dim, device="cuda").bfloat16()
    for kv in (INT8_G64, INT4_G32):
        payload, scales = kv.payload(pool, heads, dim, "cuda"), kv.scales(pool, heads, dim, "cuda")
        row = heads * dim * kv.bits // 8 + heads * dim // kv.group * 2 + 2 * heads * dim
        slots = torch.randperm(pool, device="cuda")[:1024]
        s = graph_time([partial(kv_cache.write_rows, rows, slots, payload, scales, kv)] * 24)
        yield _line("kv", f"{kv.name} write", s, 1024 * row, limits["copy"], unit="B", tokens=1024)
        for n, order in ((2051, "random"), (2**17, "random"), (2**17, "in order")):
            at = (
                torch.randperm(pool, device="cuda")[:n]
                if order == "random"
                else torch.arange(n, device="cuda")
            )
            out = torch.empty(n, heads, dim, dtype=torch.bfloat16, device="cuda")
            s = graph_time([partial(kv_cache.gather_rows, at, payload, scales, kv, out)] * 12)
            yield _line("kv", f"{kv.name} gather, {order}", s, n * row, limits["copy"], unit="B", tokens=n)


def _rows(w: Workload, limits: dict[str, float], tuned: Tuned | None, rest: Any) -> Iterator[Measurement]:
    from q38.kernels.row_mover import RowMover, gather_addresses
    from q38.kernels.samples import random_rows, row_addresses
    from q38.kernels.timing import event_time

    del tuned, rest
    nbytes = w.layout.row_bytes
    host = random_rows(w.layout, 256, pinned=True)
    target = torch.empty(256, nbytes, dtype=torch.uint8, device="cuda")
    for count in (1, 16, 256):
        picked = torch.randperm(256)[:count].tolist()
        for batched in (True, False):
            mover = RowMover(batched=batched)

            def copy(mover: RowMover = mover, picked: list[int] = picked) -> None:
                event = mover.copy(host, picked, target, range(len(picked)))
                if event is not None:
                    torch.cuda.current_stream().wait_event(event)

            name = "batched copies" if mover.batched else "single copies"
            yield _line(
                "rows",
                f"host to device, {name}",
                event_time(copy),
                count * nbytes,
                limits["link"],
                unit="B",
                tokens=count,
            )
        addresses = row_addresses(host)[picked].cuda()
        s = event_time(partial(gather_addresses, addresses, target[: len(addresses)]))
        yield _line(
            "rows", "host to device, kernel", s, count * nbytes, limits["link"], unit="B", tokens=count
        )
    resident = random_rows(w.layout, 512)
    addresses = row_addresses(resident)[torch.randperm(512)[:256]].cuda()
    s = event_time(partial(gather_addresses, addresses, target))
    yield _line("rows", "device to device, kernel", s, 2 * 256 * nbytes, limits["copy"], unit="B", tokens=256)


def _line(
    kernel: str, case: str, seconds: float, work: float, limit: float, *, unit: str, tokens: int
) -> Measurement:
    return Measurement(kernel, case, tokens, seconds * 1e6, work, unit, work / seconds, limit)
