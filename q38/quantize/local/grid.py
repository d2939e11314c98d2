"""The symmetric grid of packed matrices: scales, levels, weights, and the search for a scale.

A weight is level * scale, level in -2^(bits-1) .. 2^(bits-1) - 1; the stored code is level + 2^(bits-1).
Scales are signed and rounded to float16, as the file stores them.
"""

from __future__ import annotations

import torch

from q38.checkpoint.packing import PackedMatrix, pack, symmetric_zero, symmetric_zeros
from q38.quantize.rtn import MIN_SCALE

_SHRINK = (0.4, 1.1, 15)  # first and last multiplier of the plain scale that the search tries, and how many


def grouped(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[..., K] -> [..., groups, K / groups], a view."""
    return x.reshape(*x.shape[:-1], groups, -1)


def limits(bits: int) -> tuple[int, int]:
    """Lowest and highest level: (-2, 1) at 2 bits."""
    zero = symmetric_zero(bits)
    return -zero, zero - 1


def storable(scale: torch.Tensor) -> torch.Tensor:
    """float32 scales as float16 will hold them, kept away from zero; the sign of zero is plus."""
    scale = scale.to(torch.float16)
    return torch.where(scale < 0, scale.clamp(max=-MIN_SCALE), scale.clamp(min=MIN_SCALE)).float()


def plain_scales(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The scales of plain rounding, unrounded: float32 [..., N, G] of a weight [..., N, K]; see `q38.quantize.rtn`."""
    groups = grouped(weight.float(), weight.shape[-1] // group_size)
    low, high = groups.amin(-1).clamp(max=0).neg(), groups.amax(-1).clamp(min=0)
    return torch.where(high < low, low, -high) / symmetric_zero(bits)


def nearest(weight: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
    """Levels int8 [..., N, K] nearest to a weight [..., N, K] under scales [..., N, G]."""
    low, high = limits(bits)
    groups = grouped(weight.float(), scale.shape[-1])
    return (groups / scale.unsqueeze(-1)).round_().clamp_(low, high).to(torch.int8).flatten(-2)


def weights(levels: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Levels [..., N, K] times scales [..., N, G], in `dtype`."""
    groups = grouped(levels, scale.shape[-1]).float()
    return (groups * scale.unsqueeze(-1)).to(dtype).flatten(-2)


def search(weight: torch.Tensor, importance: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """Scales with the least importance-weighted squared error of each group: "optimal RTN".

    Tries multiples of the plain scale, of either sign.

    Args:
        weight: [N, K].
        importance: [K], for example the mean square of each input.

    Returns:
        float32 [N, G], storable.
    """
    groups = grouped(weight.float(), weight.shape[-1] // group_size)  # [N, G, g]
    importance = importance.float().view(-1, group_size)  # [G, g]
    plain = plain_scales(weight, bits, group_size)
    best = storable(plain)
    least = torch.full_like(best, torch.inf)
    for sign in (1.0, -1.0):
        for factor in torch.linspace(*_SHRINK).tolist():
            scale = storable(plain * (sign * factor))
            levels = grouped(nearest(weight, scale, bits), scale.shape[-1])
            error = ((levels * scale.unsqueeze(-1) - groups).square_() * importance).sum(-1)
            better = error < least
            least = torch.where(better, error, least)
            best = torch.where(better, scale, best)
    return best


def packed(levels: torch.Tensor, scale: torch.Tensor, bits: int) -> PackedMatrix:
    """One matrix as it is stored, on the CPU: levels int8 [N, K], scales float32 [N, G]."""
    codes = (levels + symmetric_zero(bits) if bits < 8 else levels.short() + symmetric_zero(bits)).to(
        torch.uint8
    )
    groups, n = scale.shape[1], scale.shape[0]
    return PackedMatrix(
        pack(codes.t().contiguous(), bits).cpu(),
        symmetric_zeros(groups, n, bits),
        scale.t().to(torch.float16).contiguous().cpu(),
    )
