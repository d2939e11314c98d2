"""INT8 matrix times at most 16 vectors, for wide and short matrices (hyper-connections, routers), in Triton.

The matrix is packed as AutoRound packs 8 bits: word kw of column n holds inputs 4 kw .. 4 kw + 3, a
weight is (code - 128) * scale, scales signed, one per group of inputs and column. The input dimension
is split over programs so that a narrow matrix fills the card; the last program of a column block adds
the parts in a fixed order, so equal inputs give equal bits.
Reference: q38.kernels.reference.gemv_int8.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from q38.base.errors import InputError

MAX_TOKENS = 16


@dataclass(frozen=True)
class Int8Config:
    """Columns of a program, word rows a step, parts of the input dimension, warps."""

    block_n: int = 32
    block_k: int = 64
    split: int = 40
    warps: int = 4


@triton.jit(do_not_specialize=["m"])
def _gemv(
    x, words, scales, out, partial, tickets, m,
    K: tl.constexpr, N: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    WORDS: tl.constexpr = K // 4
    STEPS: tl.constexpr = (WORDS + BK - 1) // BK
    PER: tl.constexpr = (STEPS + SPLIT - 1) // SPLIT
    dtype: tl.constexpr = x.dtype.element_ty
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    part = tl.program_id(1)
    row = tl.arange(0, BM)
    live_n = n < N
    live_m = row < m
    total = tl.zeros([BM, BN], tl.float32)
    for step in range(PER):
        kw = (part * PER + step) * BK + tl.arange(0, BK)
        live_k = kw < WORDS
        live = live_k[:, None] & live_n[None, :]
        w = tl.load(words + kw[:, None] * N + n[None, :], mask=live, other=0)  # [BK, BN]
        s = tl.load(scales + (kw * 4 // GROUP)[:, None] * N + n[None, :], mask=live, other=0.0).to(tl.float32)
        for i in tl.static_range(4):
            xi = tl.load(
                x + row[:, None] * K + kw[None, :] * 4 + i, mask=live_m[:, None] & live_k[None, :], other=0.0
            )
            code = (((w >> (8 * i)) & 255) | 0x4B000000).to(tl.float32, bitcast=True) - 8388736.0
            total = tl.dot(xi, (code * s).to(dtype), total)
    at = row[:, None] * N + n[None, :]
    live = live_m[:, None] & live_n[None, :]
    if SPLIT == 1:
        tl.store(out + at, total.to(out.dtype.element_ty), mask=live)
    else:
        tl.store(partial + part * BM * N + at, total, mask=live)
        tl.debug_barrier()  # all stores of the program come before its ticket
        ticket = tl.atomic_add(tickets + tl.program_id(0), 1, sem="acq_rel")
        if ticket == SPLIT - 1:
            total = tl.zeros([BM, BN], tl.float32)
            for p in range(SPLIT):
                total += tl.load(partial + p * BM * N + at, mask=live, other=0.0, cache_modifier=".cg")
            tl.store(out + at, total.to(out.dtype.element_ty), mask=live)
            tl.store(tickets + tl.program_id(0), 0)


class GemvInt8:
    """x @ dequantize(words, scales) for one matrix; scratch is made once, so calls can be captured.

    Args:
        words: int32 [K / 4, N], contiguous.
        scales: float16 or bfloat16 [K / group, N], contiguous.
        config: launch geometry.

    Raises:
        InputError: shapes that do not belong together.
    """

    def __init__(
        self, words: torch.Tensor, scales: torch.Tensor, *, config: Int8Config | None = None
    ) -> None:
        k, n = words.shape[0] * 4, words.shape[1]
        if (
            words.dtype != torch.int32
            or scales.shape[1] != n
            or k % scales.shape[0]
            or k // scales.shape[0] % 4
        ):
            raise InputError(
                f"words {words.dtype} {list(words.shape)} with scales {list(scales.shape)}",
                where="INT8 GEMV",
                remedy="pack the matrix as AutoRound does, at 8 bits",
            )
        self.words, self.scales, self.k, self.n = words, scales, k, n
        self.group = k // scales.shape[0]
        c = config or Int8Config()
        self.config = c
        self.split = max(1, min(c.split, triton.cdiv(k // 4, c.block_k)))
        self.partial = torch.empty(self.split * MAX_TOKENS * n, dtype=torch.float32, device=words.device)
        self.tickets = torch.zeros(triton.cdiv(n, c.block_n), dtype=torch.int32, device=words.device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [M, K] float16 or bfloat16, M at most 16 -> [M, N] of x's dtype.

        The weight (code - 128) * scale is rounded to x's dtype, as a 16-bit copy of the matrix would be.
        """
        if x.ndim != 2 or x.shape[1] != self.k or not 1 <= x.shape[0] <= MAX_TOKENS or not x.is_contiguous():
            raise InputError(
                f"x is {list(x.shape)}, the matrix takes {self.k} inputs and at most {MAX_TOKENS} rows",
                where="INT8 GEMV",
                remedy="use a matrix product for more rows",
            )
        if out is None:
            out = torch.empty(x.shape[0], self.n, dtype=x.dtype, device=x.device)
        c = self.config
        _gemv[(triton.cdiv(self.n, c.block_n), self.split)](
            x, self.words, self.scales, out, self.partial, self.tickets, x.shape[0],
            K=self.k, N=self.n, GROUP=self.group, SPLIT=self.split, BM=MAX_TOKENS, BN=c.block_n, BK=c.block_k,
            num_warps=c.warps,
        )  # fmt: skip
        return out
