"""Sort the slots (token, expert) of a prefill by expert and cut them into blocks, each of one expert.

CUDA where NVRTC is there (moe_sort.cu: three small launches), else torch. Neither synchronises with the host.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from q38.kernels import nvrtc

SOURCE = Path(__file__).with_name("moe_sort.cu")
TILE, WARPS = 1024, 8
MOST_EXPERTS = 1024  # a counter per warp and expert in 48 KiB of shared memory


class SlotBlocks(NamedTuple):
    """Sorted slots and their blocks; all int32. Experts go by their position in the order of experts.

    order: [slots], by position and then by slot; what follows the last live slot is undefined.
    block_expert: [blocks], position of each block's expert, -1 past the last block.
    block_start: [blocks], first sorted slot of each block; undefined past the last one.
    block_live: [blocks], slots of each block, at most block_m; undefined past the last one.
    first_slot: [experts + 1], where the sorted slots of each position begin; last: where all end.
    first_block: [experts + 1], the same of blocks.
    """

    order: torch.Tensor
    block_expert: torch.Tensor
    block_start: torch.Tensor
    block_live: torch.Tensor
    first_slot: torch.Tensor
    first_block: torch.Tensor


def sort_slots(
    ids: torch.Tensor, experts: int, block_m: int, positions: torch.Tensor | None = None
) -> SlotBlocks:
    """Sort slots by expert and cut them into blocks, without a device synchronisation.

    Args:
        ids: int32 [M, top_k]; negative ids are left out.
        positions: int32 [experts], where each expert stands in the order of experts; by default in that of ids.
    """
    if positions is None:
        positions = _in_order(experts, ids.device)
    if ids.is_cuda and experts <= MOST_EXPERTS and nvrtc.available() is None:
        return _sort_cuda(ids, experts, block_m, positions)
    return sort_slots_torch(ids, experts, block_m, positions)


def defines(experts: int, block_m: int) -> dict[str, int]:
    """The source's compile-time constants."""
    return {"EXPERTS": experts, "TILE": TILE, "BLOCK_SLOTS": block_m, "WARPS": WARPS}


@functools.cache
def _in_order(experts: int, device: torch.device) -> torch.Tensor:
    return torch.arange(experts, dtype=torch.int32, device=device)


def _room(slots: int, experts: int, block_m: int) -> int:
    """The most blocks that any routing makes."""
    return -(-slots // block_m) + min(experts, slots)


def _sort_cuda(ids: torch.Tensor, experts: int, block_m: int, positions: torch.Tensor) -> SlotBlocks:
    slots = ids.numel()
    tiles, room = -(-slots // TILE), _room(slots, experts, block_m)
    count, plan, place = nvrtc.load_kernels(SOURCE, defines(experts, block_m), ("count", "plan", "place"))
    sizes = (tiles * experts, slots, room, room, room, experts + 1, experts + 1)
    starts, order, *blocks = (torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes)
    on = nvrtc.in_order(ids.device)
    count.launch((tiles, 1), 32 * WARPS, (ids, positions, starts, slots), **on)
    plan.launch((1, 1), 1024, (starts, *blocks, tiles, room), **on)
    place.launch((tiles, 1), 32 * WARPS, (ids, positions, starts, order, slots), **on)
    return SlotBlocks(order, *blocks)


def sort_slots_torch(
    ids: torch.Tensor, experts: int, block_m: int, positions: torch.Tensor | None = None
) -> SlotBlocks:
    """The reference of `sort_slots`, in some twenty torch operations."""
    flat = ids.reshape(-1).to(torch.int64)
    at = flat if positions is None else positions.to(torch.int64)[flat.clamp(min=0)]
    key = torch.where(flat < 0, experts, at)
    order = torch.argsort(key, stable=True).to(torch.int32)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device)
    counts = counts.scatter_add_(0, key, torch.ones_like(key))[:experts]
    end = counts.cumsum(0)
    blocks = (counts + block_m - 1) // block_m
    block_end = blocks.cumsum(0)
    index = torch.arange(_room(flat.numel(), experts, block_m), device=ids.device)
    owner = torch.searchsorted(block_end, index, right=True)
    known = owner.clamp(max=experts - 1)
    start = end[known] - counts[known] + (index - (block_end[known] - blocks[known])) * block_m
    live = (end[known] - start).clamp(max=block_m)
    first_slot, first_block = (torch.nn.functional.pad(part, (1, 0)) for part in (end, block_end))
    parts = (torch.where(owner < experts, owner, -1), start, live, first_slot, first_block)
    return SlotBlocks(order, *(part.to(torch.int32) for part in parts))
