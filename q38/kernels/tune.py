"""Tune the decode, prefill and INT8 kernels for the GPU at hand.

Each candidate is first checked against the float32 reference and for equal bits on a second call, then
timed beside the default: decode and INT8 over a graph of many layers (cold caches), prefill over one layer.
gate-up and down are timed as a pair. A candidate is kept only when it beats the default by more than 2 %.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from q38.base.errors import ResourceError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.job import Job
from q38.checkpoint.writer import write_json
from q38.kernels.configs import Entry, Tuned, file_name
from q38.kernels.rows import RowLayout

GAIN = 0.02
MAX_ERROR = 5e-3
TOKENS = {"decode": (1, 2, 4, 8, 16), "prefill": (64, 256, 1024, 4096), "int8": (1, 4, 16)}


@dataclass(frozen=True)
class Workload:
    """What is tuned.

    layout, experts, top_k: the MoE layer.
    int8: (inputs, outputs, group) of each INT8 matrix.
    routing: int32 [layers, tokens, top_k] expert ids of a trace; None: uniform synthetic routing.
    layers: layers in a timed graph; enough that their rows exceed the L2 cache several times.
    """

    layout: RowLayout
    experts: int
    top_k: int
    int8: tuple[tuple[int, int, int], ...] = ()
    routing: torch.Tensor | None = None
    layers: int = 24

    @property
    def moe_shape(self) -> dict[str, int]:
        layout = self.layout
        return {
            "hidden": layout.hidden, "intermediate": layout.intermediate, "group": layout.group, "top_k": self.top_k,
        }  # fmt: skip

    @property
    def units(self) -> Iterator[tuple[str, dict[str, int], int]]:
        """(kernel, shape, tokens) of everything there is to tune."""
        for kernel in ("decode", "prefill"):
            for tokens in TOKENS[kernel]:
                yield kernel, self.moe_shape, tokens
        for (k, n, group), tokens in itertools.product(self.int8, TOKENS["int8"]):
            yield "int8", {"inputs": k, "outputs": n, "group": group}, tokens


def tune(
    workload: Workload,
    out: Path,
    *,
    identity: Mapping[str, Any],
    kernels: tuple[str, ...] = ("decode", "prefill", "int8"),
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Tune and write OUT/<device>.json (the configs) and OUT/report.json (every candidate's time).

    Resumable: each (kernel, shape, token count) is one unit of the job in OUT.

    Args:
        identity: what else the result depends on (model, trace), for the job's identity.

    Returns:
        The report: device, routing, and for each unit the default's and the best candidate's time.

    Raises:
        ResourceError: there is no CUDA GPU or no Triton.
        InputError: OUT holds another job.
    """
    device, version = require_gpu()
    routing = "synthetic uniform" if workload.routing is None else "trace"
    units = [u for u in workload.units if u[0] in kernels]
    known = {
        **identity,
        "device": device,
        "triton": version,
        "routing": routing,
        "units": [list(u) for u in units],
    }
    with Job(out, "tune-triton", known, fresh=fresh) as job:
        if job.up_to_date:
            return read_report(out)
        bench = Bench(workload)
        with progress.task("tuning", len(units), "units") as task:
            for kernel, shape, tokens in units:
                name = f"{kernel} {'x'.join(map(str, shape.values()))} tokens {tokens}"
                if name not in job.done:
                    task.note(name)
                    job.commit(
                        name,
                        result={
                            "kernel": kernel,
                            "shape": shape,
                            "tokens": tokens,
                            **bench.run(kernel, shape, tokens),
                        },
                    )
                task.advance(1)
        results = [line["result"] for line in job.done.values() if line["result"] is not None]
        report = {"device": device, "triton": version, "routing": routing, "results": results}
        tuned = Tuned(device, version, routing, entries_of(results))
        files = {
            file_name(device): write_json(out / file_name(device), tuned.to_dict()),
            "report.json": write_json(out / "report.json", report),
        }
        job.commit("write", files=files, result=None)
        job.finish({"tuned": sum(r["best"] is not None for r in results), "of": len(results)})
    return report


def entries_of(results: Sequence[Mapping[str, Any]]) -> tuple[Entry, ...]:
    """What a report's units put into the file: the wins.

    A lookup takes the nearest token count, so where one count of a kernel and shape has a win, the other
    counts' defaults are written beside it.
    """

    def family(result: Mapping[str, Any]) -> tuple[Any, ...]:
        return result["kernel"], *sorted(result["shape"].items())

    won = {family(r) for r in results if r["best"] is not None}
    kept = [(r, r["best"] or r["default"]) for r in results if family(r) in won]
    return tuple(
        Entry(r["kernel"], r["shape"], r["tokens"], chosen["config"], chosen["us"], r["default"]["us"])
        for r, chosen in kept
        if chosen["us"] is not None
    )


def read_report(out: Path) -> dict[str, Any]:
    """The report of a finished run."""
    from q38.checkpoint.index import read_json

    return read_json(out / "report.json")


def require_gpu() -> tuple[str, str]:
    """Device name and Triton version, or a ResourceError that says what is missing."""
    if not torch.cuda.is_available():
        raise ResourceError(
            "no CUDA GPU that torch can use",
            where="GPU kernels",
            remedy="run this on the machine with the GPU, with a CUDA build of torch; elsewhere q38 uses the "
            "shipped configs and defaults",
        )
    try:
        import triton
    except ImportError:
        raise ResourceError(
            "Triton is not installed", where="GPU kernels", remedy="pip install 'q38[kernels]'"
        ) from None
    return torch.cuda.get_device_name(), str(triton.__version__)


class Bench:
    """Data and timing of the tuning run. Rows are random: speed does not depend on their values."""

    def __init__(self, workload: Workload) -> None:
        from q38.kernels.samples import random_rows, row_addresses

        self.workload = workload
        rows_free = int(torch.cuda.mem_get_info()[0] * 0.6) // workload.layout.row_bytes
        wanted = workload.layers * workload.experts
        # A card that cannot hold every row of the timed layers shares rows between layers, in another order.
        self.pool = random_rows(workload.layout, min(wanted, max(workload.experts, rows_free)))
        generator = torch.Generator().manual_seed(0)
        addresses = row_addresses(self.pool)
        self.tables = [
            addresses[torch.randperm(len(addresses), generator=generator)[: workload.experts]].cuda()
            if len(addresses) < wanted
            else addresses[i * workload.experts : (i + 1) * workload.experts].cuda()
            for i in range(workload.layers)
        ]

    def run(self, kernel: str, shape: dict[str, int], tokens: int) -> dict[str, Any]:
        """Check and time the default and every candidate of one unit."""
        make = {"decode": self._decode, "prefill": self._prefill, "int8": self._int8}[kernel]
        times: list[dict[str, Any]] = []
        for config in candidates(kernel, self.workload, shape, tokens):
            times.append({"config": asdict(config), **make(config, shape, tokens)})
        default, *others = times
        limit = float("inf") if default["us"] is None else default["us"] * (1 - GAIN)
        passed = [t for t in others if t["us"] is not None and t["us"] < limit]
        return {
            "default": default,
            "best": min(passed, key=lambda t: t["us"], default=None),
            "candidates": others,
        }

    def routing(self, tokens: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        from q38.kernels.samples import uniform_routing

        ids, weights = uniform_routing(tokens, self.workload.experts, self.workload.top_k, seed=layer)
        if self.workload.routing is not None:
            trace = self.workload.routing[layer % len(self.workload.routing)]
            start = layer * tokens % max(1, len(trace) - tokens)
            picked = trace[start : start + tokens]
            ids = picked.repeat(-(-tokens // len(picked)), 1)[:tokens].cuda().contiguous()
        return ids, weights

    def _decode(self, config: Any, shape: dict[str, int], tokens: int) -> dict[str, Any]:
        from q38.kernels.moe_decode import MoeDecode
        from q38.kernels.timing import graph_time

        del shape
        w = self.workload
        x, routes, exact = self._inputs(tokens, tokens)
        out = torch.empty_like(x)
        moe = MoeDecode(w.layout, w.top_k, configs={tokens: config})
        calls = [
            lambda t=t, r=r: moe(x, t, r[0], r[1], out) for t, r in zip(self.tables, routes, strict=True)
        ]
        return _measure(lambda: moe(x, self.tables[0], *routes[0]), exact, lambda: graph_time(calls))

    def _prefill(self, config: Any, shape: dict[str, int], tokens: int) -> dict[str, Any]:
        from q38.kernels.moe_prefill import moe_prefill
        from q38.kernels.timing import graph_time

        del shape
        few = 32  # the reference is slow: check the first tokens
        x, routes, exact = self._inputs(tokens, few)
        ids, weights = routes[0]

        def call(n: int = tokens) -> torch.Tensor:
            return moe_prefill(
                x[:n], self.tables[0], ids[:n], weights[:n], self.workload.layout, config=config
            )

        return _measure(lambda: call(few), exact, lambda: graph_time([call] * 3, replays=5))

    def _int8(self, config: Any, shape: dict[str, int], tokens: int) -> dict[str, Any]:
        from q38.kernels import reference
        from q38.kernels.gemv_int8 import GemvInt8
        from q38.kernels.timing import graph_time

        k, n, group = shape["inputs"], shape["outputs"], shape["group"]
        count = max(2, 2**29 // (k * n))
        words = torch.randint(-(2**31), 2**31 - 1, (count, k // 4, n), dtype=torch.int32, device="cuda")
        scales = (torch.randn(k // group, n, device="cuda") / (128 * k**0.5)).half()
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        gemvs = [GemvInt8(w, scales, config=config) for w in words]
        exact = reference.gemv_int8(x, words[0], scales, torch.float32)
        return _measure(
            lambda: gemvs[0](x), exact, lambda: graph_time([functools.partial(g, x) for g in gemvs])
        )

    @functools.lru_cache(maxsize=1)  # noqa: B019  (one object, one run)
    def _inputs(
        self, tokens: int, checked: int
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
        """Activations, a routing per layer, and the exact result of the first `checked` tokens in layer 0."""
        from q38.kernels import reference

        layout = self.workload.layout
        x = torch.randn(tokens, layout.hidden, device="cuda").bfloat16()
        routes = [self.routing(tokens, i) for i in range(len(self.tables))]
        ids, weights = (part[:checked] for part in routes[0])
        first = self.pool.data_ptr()
        rows = [self.pool[(address - first) // layout.row_bytes] for address in self.tables[0].tolist()]
        exact = reference.moe(x[:checked], rows, ids, weights, layout, torch.float16, torch.float32)
        return x, routes, exact


def candidates(kernel: str, workload: Workload, shape: dict[str, int], tokens: int) -> list[Any]:
    """The default first, then every other geometry that the kernel takes."""
    if kernel == "decode":
        from q38.kernels.moe_decode import DecodeConfig, default_config, unsupported

        layout = workload.layout
        groups = layout.intermediate // 128
        batch = 1 if tokens == 1 else 2
        tiles = (
            ((1, 1), (1, 2), (2, 2), (2, 1), (2, 4), (4, 4), (5, 4), (5, 5))
            if tokens > 2
            else ((1, 1), (1, 2), (2, 2))
        )
        found = [default_config(layout, tokens)]
        # The last needs least shared memory, for cards with 100 KB a multiprocessor.
        for (t13, t2), (ctas, depth13, depth2) in itertools.product(
            tiles, ((2, 2, groups), (3, 2, 3), (3, 1, 3))
        ):
            found.append(DecodeConfig(t13, t2, ctas, ctas, depth13, max(1, min(depth2, groups)), batch))
        found.append(DecodeConfig(1, 1, 2, 2, 2, groups, batch, registers=True))
        return [c for c in dict.fromkeys(found) if unsupported(layout, workload.top_k, c) is None]
    if kernel == "prefill":
        from q38.kernels import moe_prefill_cuda, nvrtc
        from q38.kernels.moe_prefill import PrefillConfig

        cuda = workload.layout.group == 128 and nvrtc.available() is None
        if cuda:
            slots = tokens * workload.top_k
            default = moe_prefill_cuda.default_config(torch.device("cuda"), slots, workload.experts)
            if isinstance(default, moe_prefill_cuda.HopperConfig):
                return list(dict.fromkeys([default, *_hopper_candidates(workload, slots)]))
        tiles_m = {64: (16, 32), 256: (16, 32), 1024: (32, 64)}.get(tokens, (64, 128))
        picked = [
            PrefillConfig(m, n13, n2, 16, warps, stages)
            for m, (n13, n2, warps), stages in itertools.product(
                tiles_m, ((64, 64, 4), (64, 128, 4), (128, 128, 8)), (2, 3)
            )
        ]
        first = [moe_prefill_cuda.MmaConfig()] if cuda else []
        return list(dict.fromkeys([*first, PrefillConfig(), *picked]))
    from q38.kernels import gemv_int8

    groups = shape["inputs"] // shape["group"]
    picked8 = [
        gemv_int8.Int8Config(warps, split)
        for warps, split in itertools.product((4, 5, 8, 10, 16, 20), (1, 2, 4, 5, 8, 10))
        if groups <= 2 * warps * split <= 2 * groups and shape["outputs"] // 32 * split <= 640
    ]
    return list(
        dict.fromkeys([gemv_int8.default_config(shape["inputs"], shape["outputs"], shape["group"]), *picked8])
    )


def _hopper_candidates(workload: Workload, slots: int) -> list[Any]:
    """Other divisions of the columns; larger blocks where an expert gets about as many slots."""
    from q38.kernels.moe_prefill_cuda import HopperConfig

    return [
        HopperConfig(block, 2, 2, t13, t2, stages)
        for block, stages in ((64, 4), (80, 3), (96, 3))
        for t13, t2 in ((1, 1), (1, 2), (1, 5))
        if workload.layout.hidden // 256 % t2 == 0 and (block == 64 or 2 * slots >= block * workload.experts)
    ]


def _measure(
    call: Callable[[], torch.Tensor], exact: torch.Tensor, clock: Callable[[], float]
) -> dict[str, Any]:
    """Error, then time; a candidate that does not compile, launch or compute right has no time."""
    from q38.kernels.reference import relative_error

    try:
        value = call()
        error = relative_error(value, exact)
        if not error <= MAX_ERROR or not torch.equal(value, call()):
            return {"us": None, "error": error, "refused": "wrong or changing result"}
        return {"us": clock() * 1e6, "error": error}
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  (compilers and drivers raise what they like)
        return {"us": None, "error": None, "refused": " ".join(str(error).split())[:200]}
