"""One packed matrix, measured: its scales, which codes it uses, and its distance from the source.

A matrix streams through memory in pieces of a few million weights, so that the largest one (the
output head) takes no more than the smallest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import WORD, dequantize, unpack
from q38.checkpoint.source import SourceWeights

PIECE = 4 * 2**20  # weights in hand at a time

# Largest relative error ||w - w_source|| / ||w_source|| of one packed matrix, by width. The weights of
# another matrix give about sqrt(2). Plain rounding of Gaussian weights in groups of 128 stays under half
# of each limit (asserted in tests/measure/test_numbers.py); tuning and heavy tails take up the rest.
MAX_RELATIVE_ERROR: Mapping[int, float] = {2: 1.0, 3: 0.6, 4: 0.3, 8: 0.05}


@dataclass(frozen=True)
class Matrix:
    """One packed matrix [N, K] and the shape facts that its tensors imply."""

    module: str
    file: str
    bits: int
    n: int
    k: int

    @property
    def tensors(self) -> tuple[str, str, str]:
        return f"{self.module}.qweight", f"{self.module}.qzeros", f"{self.module}.scales"


@dataclass(frozen=True)
class Measured:
    """What was found in one matrix.

    bad_scales: scales that are not finite; smallest, largest: of the others, by magnitude.
    histogram: int64 [2^bits], how often each code occurs.
    in_source: whether the source has a matrix of this name and shape; None without a source.
    """

    bad_scales: int
    smallest: float
    largest: float
    histogram: torch.Tensor
    in_source: bool | None
    squared_error: float = 0.0
    squared_weight: float = 0.0


def find_matrices(model: Checkpoint) -> Iterator[Matrix]:
    """The packed matrices whose three tensors fit together; the structure check reports the others."""
    for info in model.tensors.values():
        module = info.name.removesuffix(".qweight")
        scales, zeros = model.tensors.get(f"{module}.scales"), model.tensors.get(f"{module}.qzeros")
        if module == info.name or scales is None or zeros is None:
            continue
        if not len(info.shape) == len(zeros.shape) == 2 or not info.dtype == zeros.dtype == "I32":
            continue
        words, n = info.shape
        bits = zeros.shape[1] * WORD // n if n else 0  # zeros are packed along N, so they tell the width
        if (
            bits not in MAX_RELATIVE_ERROR
            or words * WORD % bits
            or scales.dtype not in ("F16", "BF16", "F32")
        ):
            continue
        k, groups = words * WORD // bits, zeros.shape[0]
        if scales.shape == (groups, n) and groups and k % groups == 0:
            yield Matrix(module, info.file.name, bits, n, k)


def measure_matrix(model: Checkpoint, weights: SourceWeights | None, m: Matrix) -> Measured:
    """Read one matrix and compare it with the source's."""
    words, zeros, scales = (model.read(name) for name in m.tensors)
    finite = scales.isfinite()
    magnitude = scales[finite].float().abs()
    there = None if weights is None else weights.shape(m.module) == (m.n, m.k)
    histogram = torch.zeros(1 << m.bits, dtype=torch.int64)
    squared_error = squared_weight = 0.0
    for start, stop in _pieces(m):
        part = words[:, start:stop].contiguous()  # [K * bits / 32, n] int32
        histogram += count_codes(part, m.bits, m.k)
        if weights is not None and there:
            zero = zeros[:, start * m.bits // WORD : stop * m.bits // WORD].contiguous()
            found = dequantize(part, zero, scales[:, start:stop].contiguous(), m.bits)  # [n, K]
            wanted = weights.rows(m.module, start, stop)
            squared_weight += float(wanted.square().sum(dtype=torch.float64))
            squared_error += float(found.sub_(wanted).square_().sum(dtype=torch.float64))
    return Measured(
        bad_scales=int((~finite).sum()),
        smallest=float(magnitude.min()) if magnitude.numel() else float("inf"),
        largest=float(magnitude.max()) if magnitude.numel() else 0.0,
        histogram=histogram,
        in_source=there,
        squared_error=squared_error,
        squared_weight=squared_weight,
    )


def count_codes(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """How often each code occurs in packed words int32 [K * bits / 32, N]: int64 [2^bits]."""
    if 8 % bits:
        return torch.bincount(unpack(words, bits, k).flatten(), minlength=1 << bits)
    # A byte holds whole codes, so counting bytes is enough, and needs no unpacking.
    return torch.bincount(words.view(torch.uint8).flatten(), minlength=256) @ _codes_in_byte(bits)


@lru_cache
def _codes_in_byte(bits: int) -> torch.Tensor:
    """int64 [256, 2^bits]: how often each code occurs in each value of a byte."""
    values, table = torch.arange(256), torch.zeros(256, 1 << bits, dtype=torch.int64)
    for shift in range(0, 8, bits):
        table[values, (values >> shift) & ((1 << bits) - 1)] += 1
    return table


def _pieces(m: Matrix) -> Iterator[tuple[int, int]]:
    """Ranges of output columns, on whole words of the zeros, about PIECE weights each."""
    step = max(PIECE // m.k // WORD, 1) * WORD
    for start in range(0, m.n, step):
        yield start, min(start + step, m.n)
