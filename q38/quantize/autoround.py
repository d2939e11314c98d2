"""Tunes the blocks of a checkpoint with AutoRound (SignRound), in this process.

AutoRound streams one block at a time from the source, tunes and packs it; the packed matrices go to a
sink and nothing else of AutoRound's output is used. Its own saving stage is left out on purpose: it
nests a directory, rewrites config.json, keeps the vision tower, and packs MTP at 4 bits while its
config says 2.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from q38.base import settings
from q38.base.errors import CheckFailed, InputError
from q38.checkpoint.packing import PackedMatrix
from q38.model.names import Group, classify, layer_of
from q38.quantize.adjustments import Run, adjusted
from q38.quantize.coverage import counted
from q38.quantize.plan import Plan
from q38.quantize.torch_state import compute_dtype, fixed_torch
from q38.recipe.bits import PACKING
from q38.recipe.resolve import HIGH
from q38.recipe.schema import Recipe

BlockSink = Callable[[int, Callable[[str], PackedMatrix]], None]


class Stop(Exception):
    """Raised by a callback to end the run after a finished block."""


def tune(
    source: Path,
    plan: Plan,
    recipe: Recipe,
    ids: torch.Tensor,
    run: Run,
    sink: BlockSink,
    *,
    scratch: Path,
    device: str,
    threads: int,
    counts: dict[int, list[int]],
) -> None:
    """Tune every block that `run.state` has not finished yet.

    Args:
        source: bf16 or FP8 checkpoint.
        ids: calibration tokens, int64 [samples, seqlen].
        sink: called with each block's index and a function from module name to packed matrix.
        scratch: directory for AutoRound's temporary files.
        device: AutoRound's device map, for example "cpu", "0" or "0,1".
        threads: CPU threads; results differ in the last bit between thread counts.
        counts: filled with the tokens of each expert of a block, before the sink gets the block.

    Raises:
        CheckFailed: AutoRound resolved a module to another width than planned; nothing was tuned.
        InputError: AutoRound is not a supported version.
    """
    variables = {
        "AR_RESUME_DIR": str(scratch),
        "AR_WORK_SPACE": str(scratch),  # else it makes a directory where it was called
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # deterministic products on CUDA
    }
    watch = counted(counts, experts=plan.shape.num_experts, tokens=ids.numel())
    with settings.exported(variables), adjusted(run), watch, _global_state(), fixed_torch(threads):
        compressor = build(source, plan, recipe, ids, device=device)
        compressor.output_dir = compressor.compress_context.output_dir = str(scratch)
        compressor.shard_writer = _Writer(sink)
        compressor.post_init()
        check_resolved(compressor, plan)
        try:
            compressor.quantize()
        except Stop:
            return


def build(source: Path, plan: Plan, recipe: Recipe, ids: torch.Tensor, *, device: str) -> Any:
    """AutoRound's compressor for this plan, nothing run yet."""
    from auto_round import AutoRound
    from auto_round.schemes import QuantizationScheme

    experts = recipe.quantize.experts
    base = {
        "bits": plan.base_bits,
        "group_size": plan.group_size,
        "sym": True,
        "data_type": "int",
        "act_bits": HIGH,
    }
    return AutoRound(
        str(source),
        scheme=QuantizationScheme.from_dict(base),
        layer_config=layer_config(plan),
        dataset=_batches(ids, experts.batch_size),
        iters=experts.steps,
        nsamples=len(ids),
        seqlen=ids.shape[1],
        batch_size=experts.batch_size,
        enable_alg_ext=experts.alg_ext,
        device_map=device,
        amp=compute_dtype(device) is not torch.float32,
        low_gpu_mem_usage=device != "cpu",
        enable_torch_compile=False,  # the extended algorithm cannot compile the block's forward
        seed=recipe.calibration.seed,
        format=PACKING,
    )


def layer_config(plan: Plan) -> dict[str, dict[str, Any]]:
    """AutoRound's layer_config: exact names only, all of the blocks' matrices that differ from the base."""
    base = plan.base_bits
    entries: dict[str, dict[str, Any]] = {}
    for name, width in plan.bits.items():
        group = classify(name)
        if layer_of(name) is None or group is Group.ROUTER or (group is Group.EXPERTS and width == base):
            continue
        packed = {"bits": width, "group_size": plan.group_size, "sym": True, "data_type": "int"}
        entries[name] = packed if width < HIGH else {"bits": HIGH}
    return entries


def check_resolved(compressor: Any, plan: Plan) -> None:
    """Compare what AutoRound will do with what was planned, before hours are spent.

    Raises:
        CheckFailed: a matrix would be tuned at another width, or blocks would pile up in memory.
    """
    context = compressor.compress_context
    if not (context.is_immediate_packing and context.is_immediate_saving):
        raise CheckFailed(
            "AutoRound would keep all finished blocks in memory instead of handing them over",
            where="auto-round",
            remedy="report it with OUT/.q38/autoround.log",
        )
    planned = {n for n, w in plan.bits.items() if layer_of(n) is not None and classify(n) is not Group.ROUTER}
    for name, module in compressor.model_context.model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        wanted = plan.bits[name] if name in planned else HIGH
        planned.discard(name)
        found = getattr(module, "bits", HIGH)
        if found != wanted:
            raise CheckFailed(
                f"AutoRound resolved it to {found} bits, the recipe says {wanted}",
                where=name,
                remedy="report it with OUT/.q38/autoround.log",
            )
        scheme: Any = (getattr(module, "group_size", None), getattr(module, "sym", None))
        if wanted < HIGH and scheme != (plan.group_size, True):
            raise CheckFailed(
                f"AutoRound resolved it to groups of {scheme[0]} (symmetric: {scheme[1]}),"
                f" the recipe says symmetric groups of {plan.group_size}",
                where=name,
                remedy="report it with OUT/.q38/autoround.log",
            )
    if planned:
        raise CheckFailed("AutoRound's model has no such matrix", where=min(planned), remedy="report it")


class _Writer:
    """Stands in for AutoRound's ShardWriter: takes each finished block and hands it to a sink."""

    def __init__(self, sink: BlockSink) -> None:
        self._sink = sink

    def write(self, m: Any = None, name: str | None = None, is_finalize: bool = False) -> None:
        del name, is_finalize
        if m is None:
            return  # what lies outside the blocks is copied from the source
        block = layer_of(m.global_name + ".")
        if block is None:
            raise InputError(f"AutoRound finished {m.global_name}, which is no block", where="auto-round")
        prefix = m.global_name + "."

        def matrix(module: str) -> PackedMatrix:
            packed = m.get_submodule(module.removeprefix(prefix))
            return PackedMatrix(packed.qweight, packed.qzeros, packed.scales)

        self._sink(block, matrix)
        m.to("meta")

    def _flush_shard(self) -> None:
        """Part of AutoRound's interface; the sink has already made the block durable."""


def _batches(ids: torch.Tensor, batch_size: int) -> list[dict[str, Any]]:
    # A mask of None, because AutoRound otherwise makes one that hides the last token of each row.
    return [{"input_ids": rows, "attention_mask": None} for rows in torch.split(ids, batch_size)]


@contextmanager
def _global_state() -> Iterator[None]:
    """No garbage collection over what is imported already; random states and print options restored after the body."""
    # AutoRound collects garbage after every step; over the objects of all imported packages that
    # costs more than the step itself on a small model.
    gc.collect()
    gc.freeze()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        gc.unfreeze()
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        torch.set_printoptions(profile="default")  # type: ignore[no-untyped-call]
