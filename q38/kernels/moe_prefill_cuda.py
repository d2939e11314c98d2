"""The CUDA backend of the prefill MoE: pack, gate-up, pack, down, sum.

Kernels: moe_prefill_hopper.cu on Hopper (wgmma), moe_prefill.cu elsewhere (mma), moe_sort.cu, moe_sum.cu.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from q38.base.errors import ResourceError
from q38.kernels import nvrtc
from q38.kernels.moe_sort import sort_slots
from q38.kernels.rows import RowLayout

SUM = Path(__file__).with_name("moe_sum.cu")


@dataclass(frozen=True)
class Tile:
    """One source of the product and its launch.

    block_tokens: slots of a block.
    threads: of a block.
    columns: output columns of a block, of gate-up and of down.
    shared_bytes: dynamic shared memory of a block.
    constants: further compile-time constants.
    tiles: column tiles that a block works through, of gate-up and of down.
    """

    source: Path
    block_tokens: int
    threads: int
    columns: tuple[int, int]
    shared_bytes: int
    constants: Mapping[str, int]
    tiles: tuple[int, int] = (1, 1)


@dataclass(frozen=True)
class MmaConfig:
    """The mma kernels, which have one geometry."""


@dataclass(frozen=True)
class HopperConfig:
    """Geometry of the wgmma kernels.

    block_tokens: slots of a block, 64, 80, 96 or 128.
    warpgroups: 1 or 2 of a block, each with 64 columns of gate-up or 128 of down.
    ctas: blocks per multiprocessor that the register budget must allow.
    tiles13, tiles2: column tiles that a block works through, in gate-up and in down.
    stages: groups of inputs that fit in shared memory at a time; copies run stages - 2 groups ahead.
    """

    block_tokens: int = 64
    warpgroups: int = 2
    ctas: int = 2
    tiles13: int = 1
    tiles2: int = 2
    stages: int = 4


CudaConfig = MmaConfig | HopperConfig


def default_config(device: torch.device, slots: int, experts: int) -> CudaConfig:
    """The fastest source that runs on a device: larger blocks where experts get more than a small one holds."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return MmaConfig()
    return HopperConfig(block_tokens=80, stages=3) if slots > 64 * experts else HopperConfig()


def tile_of(config: CudaConfig) -> Tile:
    """The launch of a geometry."""
    if isinstance(config, MmaConfig):  # four warps, 32 columns of gate-up or 64 of down each
        return Tile(Path(__file__).with_name("moe_prefill.cu"), 64, 128, (128, 256), 0, {})
    c = config
    columns = (64 * c.warpgroups * c.tiles13, 128 * c.warpgroups * c.tiles2)
    shared = 1024 + c.stages * (c.block_tokens * 256 + c.warpgroups * 4864)  # tokens and words
    constants = {
        "BLOCK_TOKENS": c.block_tokens, "WARPGROUPS": c.warpgroups, "MIN_CTAS": c.ctas, "STAGES": c.stages,
    }  # fmt: skip
    source = Path(__file__).with_name("moe_prefill_hopper.cu")
    tiles = (c.tiles13, c.tiles2)
    return Tile(source, c.block_tokens, 128 * c.warpgroups, columns, shared, constants, tiles)


def missing(layout: RowLayout, x: torch.Tensor) -> str | None:
    """Why the CUDA kernels cannot run here, or None."""
    if layout.group != 128:
        return f"groups of {layout.group}, not 128"
    return "no CUDA device" if x.device.type != "cuda" else nvrtc.available()


def defines(
    layout: RowLayout, top_k: int, gated: bool, dtype: torch.dtype, scale_dtype: torch.dtype
) -> dict[str, int]:
    """The compile-time constants of one of the two products, beside those of its tile."""
    sizes = (layout.hidden, layout.intermediate)
    inputs, outputs = sizes if gated else sizes[::-1]
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "GATED": int(gated),
        "TOP_K": top_k,
        "W_OFFSET": layout.w13_offset if gated else layout.w2_offset,
        "S_OFFSET": layout.w13_scale_offset if gated else layout.w2_scale_offset,
        "SCALE_BF16": int(scale_dtype == torch.bfloat16),
        "ACT_BF16": int(dtype == torch.bfloat16),
    }


def sum_defines(layout: RowLayout, top_k: int, dtype: torch.dtype) -> dict[str, int]:
    """The compile-time constants of the top-k sum."""
    return {
        "OUTPUTS": layout.hidden, "TOP_K": top_k, "SCALE_BF16": 0, "ACT_BF16": int(dtype == torch.bfloat16),
    }  # fmt: skip


def run(
    x: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layout: RowLayout,
    scale_dtype: torch.dtype,
    config: CudaConfig | None = None,
) -> torch.Tensor:
    """moe_prefill for arguments that it has checked.

    Raises:
        ResourceError: the kernels cannot run here.
    """
    if (reason := missing(layout, x)) is not None:
        raise ResourceError(reason, where="prefill kernel", remedy="use the Triton backend")
    m, top_k = ids.shape
    stream = torch.cuda.current_stream(x.device).cuda_stream
    dependent = torch.cuda.get_device_capability(x.device)[0] >= 9
    tile = tile_of(config or default_config(x.device, ids.numel(), table.numel()))
    plan = sort_slots(ids, table.numel(), tile.block_tokens)
    blocks = plan[1].numel()

    def product(source: torch.Tensor, gated: bool) -> torch.Tensor:
        which = 0 if gated else 1
        constants = defines(layout, top_k, gated, x.dtype, scale_dtype)
        constants |= {**tile.constants, "TILES": tile.tiles[which]}
        pack, grouped = nvrtc.load_kernels(tile.source, constants, ("pack", "grouped"))
        rows, inputs, outputs = source.shape[0], constants["INPUTS"], constants["OUTPUTS"]
        packed = torch.empty(rows, inputs // 2, dtype=torch.int32, device=x.device)
        back = torch.empty(rows, dtype=torch.float32, device=x.device)
        out = torch.empty(m * top_k, outputs, dtype=x.dtype, device=x.device)
        pack.launch(
            (rows, 1), 32 * min(32, inputs // 128), (source, packed, back), stream=stream, dependent=dependent
        )
        arguments: tuple[Any, ...] = (packed, back, table, *plan, weights, out)
        grid = (-(-outputs // tile.columns[which]), blocks)
        if tile.shared_bytes:
            grouped.allow_shared(tile.shared_bytes)
        grouped.launch(
            grid, tile.threads, arguments, stream=stream, shared_bytes=tile.shared_bytes, dependent=dependent
        )
        return out

    partial = product(product(x, True), False)
    (sum_slots,) = nvrtc.load_kernels(SUM, sum_defines(layout, top_k, x.dtype), ("sum_slots",))
    out = torch.empty_like(x)
    sum_slots.launch(
        (m, -(-layout.hidden // 256)), 128, (partial, ids, out), stream=stream, dependent=dependent
    )
    return out
