"""Plain rounding to nearest, symmetric, in groups along K.

The scale of a group is signed: its largest weight by magnitude lands on the code that has no
mirror image (-2 at 2 bits), so that all levels are used. Equal to AutoRound's "rtn_int_sym":

    scale = -peak / 2^(bits-1), peak = the weight of largest magnitude, positive on a tie
    code = clamp(round(w / scale), -2^(bits-1), 2^(bits-1) - 1) + 2^(bits-1)
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from q38.checkpoint.packing import PackedMatrix, pack, symmetric_zero, symmetric_zeros

MIN_SCALE = 1e-5  # AutoRound's q_scale_thresh: keeps a group of zeros away from a division by zero
_CHUNK = 2**24  # weights in float32 at a time


def round_to_nearest(weight: torch.Tensor, bits: int, group_size: int) -> PackedMatrix:
    """Round one matrix.

    Args:
        weight: [N out, K in], any float dtype; K a multiple of group_size.
        bits: 2, 3, 4 or 8.
        group_size: weights that share a scale.

    Returns:
        qweight int32 [K * bits / 32, N], qzeros int32 [K / group_size, N * bits / 32], scales float16 [K / group_size, N].
    """
    n, k = weight.shape
    return round_rows(lambda start, stop: weight[start:stop], n, k, bits, group_size)


def round_rows(
    rows: Callable[[int, int], torch.Tensor], n: int, k: int, bits: int, group_size: int
) -> PackedMatrix:
    """The same for a matrix [n, k] that is read in slices: `rows(start, stop)` gives [stop - start, k]."""
    step = max(_CHUNK // k, 1)
    words, scales = [], []
    for start in range(0, n, step):
        codes, scale = _round(rows(start, min(start + step, n)), bits, group_size)
        words.append(pack(codes, bits))
        scales.append(scale)
    return PackedMatrix(
        torch.cat(words, dim=1), symmetric_zeros(k // group_size, n, bits), torch.cat(scales, dim=1)
    )


def _round(weight: torch.Tensor, bits: int, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes uint8 [K, n] and scales float16 [K / group_size, n] of some rows [n, K]."""
    n, k = weight.shape
    groups = weight.to(torch.float32).view(n, -1, group_size)  # [n, G, g]
    zero = symmetric_zero(bits)
    low, high = groups.amin(-1).clamp(max=0).neg(), groups.amax(-1).clamp(min=0)  # [n, G]
    peak = torch.where(high < low, low, -high)
    scale = (peak / zero).to(torch.float16)
    scale = torch.where(scale < 0, scale.clamp(max=-MIN_SCALE), scale.clamp(min=MIN_SCALE))
    codes = (groups / scale.to(torch.float32).unsqueeze(-1)).round_().clamp_(-zero, zero - 1).add_(zero)
    return codes.view(n, k).t().to(torch.uint8).contiguous(), scale.t().contiguous()
