"""The writes and gathers of q38.kernels.kv_cache in plain torch: the rule that kernels match, and the CPU's path."""

from __future__ import annotations

import torch

from q38.kernels.kv_formats import dequantize_reference, quantize_reference
from q38.model.kv_format import INT8_G64, KvFormat

Ring = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # int8 payload, fp16 scales, int32 owner
_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max


def write_rows(
    rows: torch.Tensor,
    slots: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    kv: KvFormat,
    ring: Ring | None = None,
    *,
    stamp: bool = True,
) -> None:
    """payload[slots[i]], scales[slots[i]] = quantize(rows[i]), and the ring's row where the slot owns its place.

    Args:
        rows: [n, heads, dim], any float dtype.
        slots: int32 or int64 [n]; a negative slot is skipped.
        stamp: let the slots take their places first; of several that meet at one place, one does.
    """
    live = slots >= 0
    rows, at = rows[live], slots[live].long()
    payload[at], scales[at] = quantize_reference(rows, kv)
    if ring is None:
        return
    ring_payload, ring_scales, owner = ring
    place = at % owner.numel()
    if stamp:
        owner[place] = at.to(owner.dtype)
    winner = owner[place].long() == at
    ring_payload[place[winner]], ring_scales[place[winner]] = quantize_reference(rows[winner], INT8_G64)


def gather_rows(
    slots: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    kv: KvFormat,
    out: torch.Tensor,
    ring: Ring | None = None,
) -> torch.Tensor:
    """out[i] = row slots[i], from the ring where it still owns the slot; a negative slot leaves out[i] as it is."""
    live = slots >= 0
    at = slots[live].long()
    found = dequantize_reference(payload[at], scales[at], kv, out.dtype)
    if ring is not None:
        ring_payload, ring_scales, owner = ring
        place = at % owner.numel()
        hot = owner[place].long() == at
        found[hot] = dequantize_reference(
            ring_payload[place[hot]], ring_scales[place[hot]], INT8_G64, out.dtype
        )
    out[live] = found
    return out


def write_plain(rows: torch.Tensor, slots: torch.Tensor, payload: torch.Tensor) -> None:
    """payload[slots[i]] = rows[i] cast to fp8, cut to what fp8 holds: the cast of CUDA gives NaN beyond it."""
    live = slots >= 0
    cast = rows[live].float().clamp(-_FP8_MAX, _FP8_MAX).to(payload.dtype)
    payload.view(torch.uint8)[slots[live].long()] = cast.view(torch.uint8)


def gather_plain(slots: torch.Tensor, payload: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """out[i] = row slots[i]; a negative slot leaves out[i] as it is."""
    live = slots >= 0
    found = payload.view(torch.uint8)[slots[live].long()].view(payload.dtype)
    out[live] = found.to(out.dtype)
    return out
