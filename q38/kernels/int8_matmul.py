"""A matrix of packed INT8 weights times any number of vectors: the GEMV for few, a plain matrix product for many.

For many vectors the matrix is unpacked to the vectors' dtype first, a block of columns at a time, into scratch memory that
all matrices of a stream share: the product then runs at the rate of the vendor's library, and unpacking costs one pass over the matrix.
Reference: q38.kernels.reference.gemv_int8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from q38.kernels.gemv_int8 import GemvInt8
from q38.kernels.gemv_int8_triton import MAX_TOKENS
from q38.kernels.reference import dequantize_words

SCRATCH = 24 * 2**20  # elements of an unpacked block
_COLUMNS = 256  # a block's columns are a multiple


class Int8Matrix:
    """words int32 [K / 4, N] and scales 16-bit [K / group, N] of one matrix, as AutoRound packs it, symmetric.

    Raises:
        InputError: shapes that do not belong together.
    """

    def __init__(self, words: torch.Tensor, scales: torch.Tensor) -> None:
        self.words, self.scales = words, scales
        self.k, self.n = words.shape[0] * 4, words.shape[1]
        self._few = GemvInt8(words, scales) if words.device.type == "cuda" else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] float16 or bfloat16 -> [..., N] of x's dtype."""
        flat = x.reshape(-1, self.k).contiguous()
        if self._few is not None and 1 <= len(flat) <= MAX_TOKENS:
            out = self._few(flat)
        else:
            out = self.many(flat)
        return out.view(*x.shape[:-1], self.n)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels of few vectors, before a graph is captured."""
        if self._few is not None:
            for tokens in (1, MAX_TOKENS):
                self._few(torch.zeros(tokens, self.k, dtype=dtype, device=self.words.device))

    def many(self, x: torch.Tensor) -> torch.Tensor:
        """The plain product: x [M, K] -> [M, N], for any M and on any device."""
        if x.device.type != "cuda":
            return x @ dequantize_words(self.words, self.scales, 8, torch.float32).to(x.dtype)
        out = torch.empty(len(x), self.n, dtype=x.dtype, device=x.device)
        width = max(SCRATCH // self.k // _COLUMNS, 1) * _COLUMNS
        for first in range(0, self.n, width):
            columns = min(width, self.n - first)
            block = unpack(self.words, self.scales, first, columns, x.dtype)
            torch.mm(x, block, out=out[:, first : first + columns])
        return out


def unpack(
    words: torch.Tensor, scales: torch.Tensor, first: int, columns: int, dtype: torch.dtype
) -> torch.Tensor:
    """Columns [first, first + columns) of the matrix, [K, columns] of dtype. Valid until the next call.

    Each weight, (code - 128) * scale in float32, is rounded once.
    """
    k = words.shape[0] * 4
    out = _scratch(dtype, words.device, k * columns)[: k * columns].view(k, columns)
    grid = (triton.cdiv(columns, 128), triton.cdiv(words.shape[0], 16))
    _unpack[grid](
        words, scales, out, first, words.shape[0], words.shape[1], columns,
        GROUP=k // scales.shape[0], BK=16, BN=128,
    )  # fmt: skip
    return out


_made: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}


def _scratch(dtype: torch.dtype, device: torch.device, least: int) -> torch.Tensor:
    """One buffer for all matrices of a stream: they are used one after the other there."""
    key = (dtype, device, torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0)
    found = _made.get(key)
    if found is None or len(found) < least:
        found = _made[key] = torch.empty(max(least, SCRATCH), dtype=dtype, device=device)
    return found


@triton.jit(do_not_specialize=["first"])
def _unpack(
    words, scales, out, first, rows, n, columns,
    GROUP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * BN + tl.arange(0, BN)
    row = tl.program_id(1) * BK + tl.arange(0, BK)  # of words
    live = (row < rows)[:, None] & (column < columns)[None, :]
    at = row.to(tl.int64)[:, None] * n + first + column[None, :]
    w = tl.load(words + at, mask=live, other=0)  # [BK, BN] int32
    scale_at = (row * 4 // GROUP).to(tl.int64)[:, None] * n + first + column[None, :]
    s = tl.load(scales + scale_at, mask=live, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64)[:, None] * 4 * columns + column[None, :]
    for i in tl.static_range(4):
        value = (((w >> (8 * i)) & 255) - 128).to(tl.float32) * s
        tl.store(to + i * columns, value.to(out.dtype.element_ty), mask=live)
