"""The Triton backend of the INT8 GEMV: where NVRTC is missing, or sizes that the CUDA kernel does not take.

The input dimension is split over programs so that a narrow matrix fills the card; the last program of a
column block adds the parts in a fixed order. The weight (code - 128) * scale is rounded to x's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

MAX_TOKENS = 16


@dataclass(frozen=True)
class TritonInt8Config:
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


class TritonGemv:
    """words int32 [K / 4, N] and scales [K / group, N] of one matrix, and the scratch of its launches."""

    def __init__(self, words: torch.Tensor, scales: torch.Tensor, config: TritonInt8Config) -> None:
        self.words, self.scales, self.config = words, scales, config
        self.k, self.n = words.shape[0] * 4, words.shape[1]
        self.split = max(1, min(config.split, triton.cdiv(self.k // 4, config.block_k)))
        device = words.device
        self.partial = torch.empty(self.split * MAX_TOKENS * self.n, dtype=torch.float32, device=device)
        self.tickets = torch.zeros(triton.cdiv(self.n, config.block_n), dtype=torch.int32, device=device)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """x [M, K] -> out [M, N], both contiguous."""
        c = self.config
        _gemv[(triton.cdiv(self.n, c.block_n), self.split)](
            x, self.words, self.scales, out, self.partial, self.tickets, x.shape[0],
            K=self.k, N=self.n, GROUP=self.k // self.scales.shape[0], SPLIT=self.split, BM=MAX_TOKENS,
            BN=c.block_n, BK=c.block_k, num_warps=c.warps,
        )  # fmt: skip
