"""The CUDA backend of the prefill MoE: pack, gate-up, pack, down, sum.

Kernels: moe_prefill_hopper.cu on Hopper (wgmma), moe_prefill.cu elsewhere (mma), moe_sort.cu, moe_sum.cu.
Gate-up, pack and down may go through the experts in parts, each once its rows are there.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from q38.base.errors import ResourceError
from q38.kernels import nvrtc
from q38.kernels.moe_sort import SlotBlocks, sort_slots
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


def missing(layout: RowLayout, device: torch.device) -> str | None:
    """Why the CUDA kernels cannot run there, or None."""
    if layout.group != 128:
        return f"groups of {layout.group}, not 128"
    return "no CUDA device" if device.type != "cuda" else nvrtc.available()


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


@dataclass(frozen=True)
class Parts:
    """One layer's experts in an order, and where that order is cut.

    positions: int32 [experts], on the device: where each expert stands in the order. The table goes by position.
    ranges: (begin, end) positions, one after the other. Taking the next one must leave the stream in a state in which its
        rows can be read; the ones before it are enqueued by then.
    """

    positions: torch.Tensor
    ranges: Iterable[tuple[int, int]]


def run(
    x: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layout: RowLayout,
    scale_dtype: torch.dtype,
    config: CudaConfig | None = None,
    parts: Parts | None = None,
) -> torch.Tensor:
    """moe_prefill for arguments that it has checked.

    Raises:
        ResourceError: the kernels cannot run here.
    """
    if (reason := missing(layout, x.device)) is not None:
        raise ResourceError(reason, where="prefill kernel", remedy="use the Triton backend")
    experts, dependent = table.numel(), nvrtc.takes_dependent(x.device)
    tile = tile_of(config or default_config(x.device, ids.numel(), experts))
    sort = sort_slots(ids, experts, tile.block_tokens, None if parts is None else parts.positions)
    gate_up = _Product(True, x.shape[0], ids, layout, tile, sort, x.dtype, scale_dtype)
    down = _Product(False, ids.numel(), ids, layout, tile, sort, x.dtype, scale_dtype)
    gate_up.pack(x, x.shape[0], 0, experts)
    for begin, end in ((0, experts),) if parts is None else parts.ranges:
        # What a part waits for comes between two launches: the first one after it is a plain one.
        h = gate_up.multiply(table, weights, begin, end, dependent=dependent and parts is None)
        # A part is a stretch of the sorted slots, whose length only the device knows.
        down.pack(h, ids.numel() if parts is None else min(ids.numel(), _pack_blocks(x.device)), begin, end)
        partial = down.multiply(table, weights, begin, end, dependent=dependent)
    (sum_slots,) = nvrtc.load_kernels(SUM, sum_defines(layout, ids.shape[1], x.dtype), ("sum_slots",))
    out = torch.empty_like(x)
    grid = (x.shape[0], -(-layout.hidden // 256))
    stream = torch.cuda.current_stream(x.device).cuda_stream
    sum_slots.launch(grid, 128, (partial, ids, out), stream=stream, dependent=dependent)
    return out


class _Product:
    """Gate-up or down of one call: its two kernels, and the buffers that all parts share.

    Args:
        rows: of its inputs. Outputs are one row a slot.
    """

    def __init__(
        self,
        gated: bool,
        rows: int,
        ids: torch.Tensor,
        layout: RowLayout,
        tile: Tile,
        sort: SlotBlocks,
        dtype: torch.dtype,
        scale_dtype: torch.dtype,
    ) -> None:
        which, device = 0 if gated else 1, ids.device
        constants = defines(layout, ids.shape[1], gated, dtype, scale_dtype)
        constants |= {**tile.constants, "TILES": tile.tiles[which]}
        self._pack, self._grouped = nvrtc.load_kernels(tile.source, constants, ("pack", "grouped"))
        if tile.shared_bytes:
            self._grouped.allow_shared(tile.shared_bytes)
        self.tile, self.sort, self.slots = tile, sort, ids.numel()
        self.inputs, outputs = constants["INPUTS"], constants["OUTPUTS"]
        self.columns = -(-outputs // tile.columns[which])  # blocks that share the columns
        self.packed = torch.empty(rows, self.inputs // 2, dtype=torch.int32, device=device)
        self.back = torch.empty(rows, dtype=torch.float32, device=device)
        self.out = torch.empty(self.slots, outputs, dtype=dtype, device=device)
        self.stream = torch.cuda.current_stream(device).cuda_stream
        self.dependent = nvrtc.takes_dependent(device)

    def pack(self, source: torch.Tensor, blocks: int, begin: int, end: int) -> None:
        """Pack the inputs: of gate-up all of them, of down those of the experts from begin to before end."""
        arguments = (source, self.packed, self.back, self.sort.order, self.sort.first_slot, begin, end)
        threads = 32 * min(32, self.inputs // 128)
        self._pack.launch((blocks, 1), threads, arguments, stream=self.stream, dependent=self.dependent)

    def multiply(
        self, table: torch.Tensor, weights: torch.Tensor, begin: int, end: int, *, dependent: bool
    ) -> torch.Tensor:
        """Compute the slots of those experts. Returns the output of all slots."""
        order, block_expert, block_start, block_live, _, first_block = self.sort
        blocks = self.slots // self.tile.block_tokens + min(end - begin, self.slots)  # the most there can be
        arguments = (
            self.packed, self.back, table, order, block_expert, block_start, block_live, first_block, weights, self.out,
            begin, end,
        )  # fmt: skip
        self._grouped.launch(
            (self.columns, blocks),
            self.tile.threads,
            arguments,
            stream=self.stream,
            shared_bytes=self.tile.shared_bytes,
            dependent=dependent,
        )
        return self.out


@functools.cache
def _pack_blocks(device: torch.device) -> int:
    """Blocks that fill a device, several times over."""
    return 32 * int(torch.cuda.get_device_properties(device).multi_processor_count)
