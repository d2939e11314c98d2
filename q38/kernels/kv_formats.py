"""Quantized KV rows: the three formats, and plain torch references that the kernels match bit for bit.

A row is one token's keys or values of one layer: [heads, dim].

    int8_g64   int8 [heads, dim], one fp16 scale per 64 channels
    int4_g32   uint8 [heads, dim / 2], low nibble the even channel, stored code + 8, one fp16 scale per 32
    tiered     every row in int4_g32, and the last R written rows also in int8_g64 in a ring

scale = absmax / qmax (127 and 7), 1 for an all-zero group, limited to the fp16 maximum before the cast
(a cast of more gives inf, and then NaN). The stored fp16 scale is the one that codes are rounded with:
code = round half to even (value / scale), an IEEE division, limited to +-qmax.

The ring: slot s belongs at s mod R. A write stamps owner[s mod R] = s first; of several slots of one
launch that meet at one place exactly one keeps the stamp and writes its int8 row. A reader of slot s
takes int8 when owner[s mod R] == s, else int4, so a lost or stale place costs precision and no more.
"""

from __future__ import annotations

import torch

from q38.model.kv_format import KvFormat

FP16_MAX = 65504.0


def quantize_reference(rows: torch.Tensor, kv: KvFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, heads, dim] of any float dtype -> payload and fp16 scales of the format."""
    grouped = rows.float().reshape(*rows.shape[:-1], -1, kv.group)  # [n, heads, groups, group]
    absmax = grouped.abs().amax(-1)
    scale = torch.where(absmax == 0, 1.0, absmax / kv.qmax).clamp(max=FP16_MAX).half()
    # A scale below half the smallest fp16 subnormal is stored as 0: its group is all codes 0.
    divisor = torch.where(scale == 0, 1.0, scale.float())
    codes = torch.round(grouped / divisor[..., None]).clamp(-kv.qmax, kv.qmax)
    codes = torch.where(scale[..., None] == 0, 0.0, codes).flatten(-2)  # [n, heads, dim]
    if kv.bits == 8:
        return codes.to(torch.int8), scale
    shifted = codes.to(torch.int32) + 8
    return (shifted[..., 0::2] | shifted[..., 1::2] << 4).to(torch.uint8), scale


def dequantize_reference(
    payload: torch.Tensor, scales: torch.Tensor, kv: KvFormat, dtype: torch.dtype
) -> torch.Tensor:
    """Payload and scales of n rows -> [n, heads, dim]: code * scale in fp32, then rounded to dtype."""
    if kv.bits == 8:
        codes = payload.float()
    else:
        wide = payload.to(torch.int32)
        codes = torch.stack((wide & 15, wide >> 4), dim=-1).flatten(-2).float() - 8.0
    values = torch.mul(codes.reshape(*scales.shape, kv.group), scales.float()[..., None])
    return values.flatten(-2).to(dtype)
