"""The kernels at a model's sizes: what `q38 bench kernels` and `q38 tune-triton` run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError
from q38.base.files import holds
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import fingerprint_file, read_json
from q38.data import data_path
from q38.model.shape import ModelShape

if TYPE_CHECKING:
    from q38.kernels.tune import Workload

RELEASE = ("assets", "triton", "qwen3.8-flash-next.json")  # the sizes of the release's config.json
GROUP = 128


@dataclass(frozen=True)
class Sizes:
    """What the kernels need of config.json, field by field as it spells them, and the quantization group."""

    hidden_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    hc_count: int
    hc_lowrank: int
    num_key_value_heads: int
    head_dim: int
    group: int = GROUP

    @property
    def int8(self) -> tuple[tuple[int, int, int], ...]:
        """(inputs, outputs, group) of the matrices that the INT8 kernel is for: hyper-connections and router."""
        wide = self.hc_count * self.hidden_size
        shapes = ((wide, self.hc_lowrank), (self.hc_lowrank, wide), (self.hidden_size, self.num_experts))
        return tuple((k, n, next(g for g in (128, 64, 32, 16, 8, 4) if k % g == 0)) for k, n in shapes)


def read_sizes(model: Path | None) -> Sizes:
    """Sizes from MODEL/config.json, or those of Qwen3.8-Flash-Next when no model is given.

    Raises:
        InputError: no readable Qwen4-Exp config.
    """
    if model is None:
        return Sizes(**read_json(data_path(*RELEASE)))
    config = read_json(model / "config.json")
    shape = ModelShape.from_config(config, where=str(model / "config.json"))
    quantization = config.get("quantization_config")
    group = quantization.get("group_size", GROUP) if isinstance(quantization, Mapping) else GROUP
    fields = {name: getattr(shape, name) for name in Sizes.__dataclass_fields__ if name != "group"}
    return Sizes(**fields, group=group if isinstance(group, int) and group > 0 else GROUP)


def make_workload(sizes: Sizes, trace: Path | None, layers: int) -> Workload:
    """The kernels' workload, with the routing of a trace file where one is given.

    Raises:
        InputError: the trace is of another model.
    """
    import torch

    from q38.kernels.tune import Workload
    from q38.residency.layout import ExpertLayout
    from q38.residency.trace import read_trace

    if layers < 1:
        raise InputError(f"{layers} layers", where="--layers", remedy="give at least 1")
    routing = None
    if trace is not None:
        recorded = read_trace(trace)
        if (recorded.experts, recorded.top_k) != (sizes.num_experts, sizes.num_experts_per_tok):
            raise InputError(
                f"top {recorded.top_k} of {recorded.experts} experts, the model has top "
                f"{sizes.num_experts_per_tok} of {sizes.num_experts}",
                where=trace,
                remedy="record a trace of this model with q38 build-placement --trace",
            )
        routing = torch.from_numpy(recorded.ids).permute(1, 0, 2).to(torch.int32).contiguous()
    layout = ExpertLayout(sizes.hidden_size, sizes.moe_intermediate_size, sizes.group)
    return Workload(layout, sizes.num_experts, sizes.num_experts_per_tok, sizes.int8, routing, layers)


def refuse_other(file: Path) -> None:
    """Refuse to write a result over a file that is none.

    Raises:
        InputError: as said.
    """
    holds(file, "result of q38 bench kernels", lambda f: {"limits", "results"} <= read_json(f).keys())


def bench_model_kernels(
    model: Path | None,
    *,
    trace: Path | None = None,
    configs: Path | None = None,
    layers: int = 24,
    host_share: float = 0.16,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """q38.kernels.bench.bench_kernels at a model's sizes.

    Raises:
        InputError: bad config, trace or tuned file. ResourceError: no CUDA GPU or no Triton.
    """
    if not 0 <= host_share <= 1:
        raise InputError(f"{host_share}", where="--host-share", remedy="give a fraction from 0 to 1")
    sizes = read_sizes(model)
    workload = make_workload(sizes, trace, layers)
    from q38.kernels.bench import bench_kernels
    from q38.kernels.configs import load

    tuned = load(configs) if configs else None
    return bench_kernels(
        workload, heads=sizes.num_key_value_heads, dim=sizes.head_dim, host_share=host_share, tuned=tuned, progress=progress
    )  # fmt: skip


def tune_model_kernels(
    model: Path | None,
    out: Path,
    *,
    trace: Path | None = None,
    kernels: tuple[str, ...] = ("decode", "prefill", "int8"),
    layers: int = 24,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """q38.kernels.tune.tune at a model's sizes.

    Raises:
        InputError: bad config or trace, unknown kernel, OUT holds something else.
        ResourceError: no CUDA GPU or no Triton.
    """
    plan = plan_tuning(model, trace=trace, kernels=kernels, layers=layers)
    from q38.kernels.tune import require_gpu, tune

    require_gpu()
    if trace is None:
        progress.say(
            "no --trace given: tuning on synthetic uniform routing, which real routing is not; "
            "record one with q38 build-placement --trace"
        )
    identity = {
        "sizes": vars(plan.sizes),
        "layers": layers,
        "trace": None if trace is None else fingerprint_file(trace),
    }
    return tune(plan.workload, out, identity=identity, kernels=kernels, fresh=fresh, progress=progress)


@dataclass(frozen=True)
class TuningPlan:
    """What a tuning run would do: its workload and (kernel, shape, tokens) units."""

    sizes: Sizes
    workload: Workload
    units: list[tuple[str, dict[str, int], int]]


def plan_tuning(
    model: Path | None, *, trace: Path | None, kernels: tuple[str, ...], layers: int
) -> TuningPlan:
    """Check the inputs of a tuning run and list its units. Needs no GPU.

    Raises:
        InputError: bad config or trace, or an unknown kernel.
    """
    from q38.kernels.configs import KERNELS

    unknown = next((k for k in kernels if k not in KERNELS), None)
    if unknown is not None or not kernels:
        raise InputError(
            f"unknown kernel '{unknown or ''}'",
            where="--kernels",
            remedy=f"choose from: {', '.join(KERNELS)}",
        )
    sizes = read_sizes(model)
    workload = make_workload(sizes, trace, layers)
    return TuningPlan(sizes, workload, [u for u in workload.units if u[0] in kernels])
