"""Symmetric INT8 rounding in groups along K, and how far it lands from the weights.

    scale = float16(clip * max|w| / 127), clip = 1 unless searched
    code  = clamp(round(w / scale), -128, 127) + 128

The stored float16 scale is the one divided by, so its own rounding costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

BITS = 8
LEVELS = 127  # the largest code on either side; -128 is reached only by a scale that rounded down
MIN_SCALE = 2.0**-24  # smallest positive float16: a group of zeros must not divide by zero
CLIPS = tuple(1 - i / 100 for i in range(21))  # candidates of the clip search, widest first


class Errors(NamedTuple):
    """Sums over the groups of some rows.

    squared_error, squared_norm: float32 [n, K / group_size].
    clipped: weights beyond the outermost code.
    """

    squared_error: torch.Tensor
    squared_norm: torch.Tensor
    clipped: int


class Rounded(NamedTuple):
    """Some rows [n, K] after rounding.

    codes: uint8 [n, K], zero at 128.
    scales: float16 [n, K / group_size], positive.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    errors: Errors


@dataclass(frozen=True)
class Deviation:
    """How far a rounded matrix lies from its weights.

    relative_error: |W - W'| / |W| in the Frobenius norm.
    clipped_fraction: weights beyond the outermost code, of all weights.
    worst_row, worst_group, worst_relative_error: the group with the largest relative error of its own.
    """

    relative_error: float
    clipped_fraction: float
    worst_row: int
    worst_group: int
    worst_relative_error: float


def round_int8(weight: torch.Tensor, group_size: int, *, clip_search: bool = False) -> Rounded:
    """Round some rows.

    A value that is infinite or not a number makes the scale of its group so.

    Args:
        weight: float32 [n, K]; K a multiple of group_size.
        clip_search: per group, take the candidate of CLIPS with the least squared error.
    """
    n, k = weight.shape
    groups = weight.view(n, k // group_size, group_size)  # [n, G, g]
    largest = groups.abs().amax(-1)  # [n, G]; an infinity norm takes ten times as long
    scales = _searched(groups, largest) if clip_search else _scales(largest)
    # Counting is dear, and a scale of max|w| / 127 clips only where float16 is too coarse for it.
    beyond = bool((largest > (LEVELS + 0.5) * scales.float()).any())
    clipped = _count_clipped(groups, scales) if beyond else 0
    codes, error = _nearest(groups, scales)
    stored = codes.add_(LEVELS + 1).to(torch.uint8).view(n, k)
    return Rounded(stored, scales, Errors(error, _squared_norms(groups), clipped))


def deviation(parts: Sequence[Errors], group_size: int) -> Deviation:
    """Over all rows of a matrix, given in order. Does not depend on how the rows were divided."""
    error = np.concatenate([part.squared_error.numpy() for part in parts])  # [N, G] float32
    norm = np.concatenate([part.squared_norm.numpy() for part in parts])
    ratio = np.divide(error, norm, out=np.zeros_like(error), where=norm > 0)
    worst_row, worst_group = divmod(int(ratio.argmax()), error.shape[1])
    # numpy adds in one order whatever the number of threads.
    total_error, total_norm = float(error.sum(dtype=np.float64)), float(norm.sum(dtype=np.float64))
    return Deviation(
        relative_error=math.sqrt(total_error / total_norm) if total_norm else 0.0,
        clipped_fraction=sum(part.clipped for part in parts) / (error.size * group_size),
        worst_row=worst_row,
        worst_group=worst_group,
        worst_relative_error=math.sqrt(ratio[worst_row, worst_group]),
    )


def _searched(groups: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    best_scales, best_error = _scales(largest), torch.full_like(largest, math.inf)
    for clip in CLIPS:
        scales = _scales(largest * clip)
        _, error = _nearest(groups, scales)
        better = error < best_error  # on a tie the wider one stays
        best_scales = torch.where(better, scales, best_scales)
        best_error = torch.where(better, error, best_error)
    return best_scales


def _scales(largest: torch.Tensor) -> torch.Tensor:
    return (largest / LEVELS).to(torch.float16).clamp_min_(MIN_SCALE)


def _nearest(groups: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes in float32 [n, G, g], zero at 0, and squared errors [n, G]."""
    step = scales.float().unsqueeze(-1)
    codes = (groups / step).round_().clamp_(-LEVELS - 1, LEVELS)
    return codes, _squared_norms(torch.addcmul(groups, codes, step, value=-1))


def _count_clipped(groups: torch.Tensor, scales: torch.Tensor) -> int:
    steps = (groups / scales.float().unsqueeze(-1)).round_()
    return int(((steps > LEVELS) | (steps < -LEVELS - 1)).sum())


def _squared_norms(groups: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = torch.linalg.vector_norm(groups, dim=-1)
    return norms.square_()
