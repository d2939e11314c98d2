"""Sort the slots (token, expert) of a prefill by expert and cut them into blocks, each of one expert.

CUDA where NVRTC is there (moe_sort.cu: three small launches), else torch. Neither synchronises with the host.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from q38.kernels import nvrtc

SOURCE = Path(__file__).with_name("moe_sort.cu")
TILE, WARPS = 1024, 8
MOST_EXPERTS = 1024  # a counter per warp and expert in 48 KiB of shared memory


def sort_slots(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, ...]:
    """Sort slots by expert and cut them into blocks, without a device synchronisation.

    Args:
        ids: int32 [M, top_k]; negative ids are left out.

    Returns:
        order int32 [slots]: slots, by expert and then by slot; what follows the last live slot is undefined.
        block_expert int32 [blocks]: expert of each block, -1 past the last one.
        block_start int32 [blocks]: first sorted position of each block; undefined past the last one.
        block_live int32 [blocks]: slots of each block, at most block_m; undefined past the last one.
    """
    if ids.is_cuda and experts <= MOST_EXPERTS and nvrtc.available() is None:
        return _sort_cuda(ids, experts, block_m)
    return sort_slots_torch(ids, experts, block_m)


def defines(experts: int, block_m: int) -> dict[str, int]:
    """The source's compile-time constants."""
    return {"EXPERTS": experts, "TILE": TILE, "BLOCK_SLOTS": block_m, "WARPS": WARPS}


def _room(slots: int, experts: int, block_m: int) -> int:
    """The most blocks that any routing makes."""
    return -(-slots // block_m) + min(experts, slots)


def _sort_cuda(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, ...]:
    slots = ids.numel()
    tiles, room = -(-slots // TILE), _room(slots, experts, block_m)
    count, plan, place = nvrtc.load_kernels(SOURCE, defines(experts, block_m), ("count", "plan", "place"))
    sizes = (tiles * experts, slots, room, room, room)
    starts, order, block_expert, block_start, block_live = (
        torch.empty(size, dtype=torch.int32, device=ids.device) for size in sizes
    )
    on: dict[str, Any] = {
        "stream": torch.cuda.current_stream(ids.device).cuda_stream,
        "dependent": torch.cuda.get_device_capability(ids.device)[0] >= 9,
    }
    count.launch((tiles, 1), 32 * WARPS, (ids, starts, slots), **on)
    plan.launch((1, 1), 1024, (starts, block_expert, block_start, block_live, tiles, room), **on)
    place.launch((tiles, 1), 32 * WARPS, (ids, starts, order, slots), **on)
    return order, block_expert, block_start, block_live


def sort_slots_torch(ids: torch.Tensor, experts: int, block_m: int) -> tuple[torch.Tensor, ...]:
    """The reference of `sort_slots`, in some twenty torch operations."""
    flat = ids.reshape(-1).to(torch.int64)
    key = torch.where(flat < 0, experts, flat)
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
    block_expert = torch.where(owner < experts, owner, -1)
    return order, block_expert.to(torch.int32), start.to(torch.int32), live.to(torch.int32)
