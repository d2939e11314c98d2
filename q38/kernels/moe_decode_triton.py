"""Decode MoE in Triton: any group size and any card that Triton supports, also in its interpreter.

A code is read as a float by masking: ((w & 3 << 2i) | 0x4b000000) is the float 2**23 + 4**i * q, so
one logic instruction, one subtraction and one fused multiply-add serve a weight; activations carry
4**-i. All sums are fp32 and in a fixed order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

if TYPE_CHECKING:
    from q38.kernels.moe_decode import MoeDecode


@triton.jit
def _dot_words(words, x, kw, live):
    """sum over the 16 inputs of each word of (q - 2) * x: words [BK, BN], x a pointer -> [BK, BN] fp32."""
    total = tl.zeros(words.shape, tl.float32)
    zero = tl.zeros(kw.shape, tl.float32)
    for i in tl.static_range(16):
        xi = tl.load(x + kw * 16 + i, mask=live, other=0.0).to(tl.float32)  # [BK]
        half = words if i < 8 else words >> 16
        code = ((half & (3 << (2 * (i % 8)))) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
        total += code * (xi * (1.0 / (1 << (2 * (i % 8)))))[:, None]
        zero += xi
    return total - 2.0 * zero[:, None]


@triton.jit
def _matrix(row, offset, base, base_address, kw, n, columns, live):
    """Words [BK, BN] of the matrix `offset` bytes into a row."""
    # From a typed base with a 16-byte unit, so that the loads stay 16 bytes wide.
    start = base + ((row + offset - base_address) >> 4) * 4
    return tl.load(start + kw[:, None] * columns + n[None, :], mask=live, other=0)


@triton.jit
def _gate_up(
    x, table, ids, h, base, scale_base, base_address, scale_address,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, GROUP_WORDS: tl.constexpr, TOP_K: tl.constexpr,
    W13: tl.constexpr, S13: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    expert = tl.load(ids + slot)
    if expert >= 0:
        row = tl.load(table + expert)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live_n = n < INTER
        gate = tl.zeros([BK, BN], tl.float32)
        up = tl.zeros([BK, BN], tl.float32)
        scales = scale_base + ((row + S13 - scale_address) >> 4) * 8
        for k0 in range(0, HIDDEN // 16, BK):
            kw = k0 + tl.arange(0, BK)
            live_k = kw < HIDDEN // 16
            live = live_k[:, None] & live_n[None, :]
            xs = x + (slot // TOP_K) * HIDDEN
            at = scales + (kw // GROUP_WORDS)[:, None] * (2 * INTER) + n[None, :]
            words = _matrix(row, W13, base, base_address, kw, n, 2 * INTER, live)
            gate += _dot_words(words, xs, kw, live_k) * tl.load(at, mask=live, other=0.0).to(tl.float32)
            words = _matrix(row, W13, base, base_address, kw, n + INTER, 2 * INTER, live)
            up += _dot_words(words, xs, kw, live_k) * tl.load(at + INTER, mask=live, other=0.0).to(tl.float32)
        g = tl.sum(gate, 0)
        value = g / (1.0 + tl.exp(-g)) * tl.sum(up, 0)
        tl.store(h + slot * INTER + n, value, mask=live_n)


@triton.jit
def _down(
    h, table, ids, weights, partial, base, scale_base, base_address, scale_address,
    HIDDEN: tl.constexpr, INTER: tl.constexpr, GROUP_WORDS: tl.constexpr,
    W2: tl.constexpr, S2: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    live_n = n < HIDDEN
    total = tl.zeros([BN], tl.float32)
    expert = tl.load(ids + slot)
    if expert >= 0:
        row = tl.load(table + expert)
        scales = scale_base + ((row + S2 - scale_address) >> 4) * 8
        sums = tl.zeros([BK, BN], tl.float32)
        for k0 in range(0, INTER // 16, BK):
            kw = k0 + tl.arange(0, BK)
            live_k = kw < INTER // 16
            live = live_k[:, None] & live_n[None, :]
            at = scales + (kw // GROUP_WORDS)[:, None] * HIDDEN + n[None, :]
            words = _matrix(row, W2, base, base_address, kw, n, HIDDEN, live)
            sums += _dot_words(words, h + slot * INTER, kw, live_k) * tl.load(at, mask=live, other=0.0).to(
                tl.float32
            )
        total = tl.sum(sums, 0) * tl.load(weights + slot)
    tl.store(partial + slot * HIDDEN + n, total, mask=live_n)


@triton.jit
def _sum_slots(partial, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for k in range(TOP_K):
        total += tl.load(partial + (token * TOP_K + k) * HIDDEN + n, mask=n < HIDDEN, other=0.0)
    tl.store(out + token * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)


def launch(
    moe: MoeDecode,
    x: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
    *,
    block_n: int = 32,
    block_k: int = 16,
    warps: int = 2,
) -> None:
    """The three launches of one layer; arguments as in MoeDecode.__call__."""
    layout, m = moe.layout, x.shape[0]
    slots = m * moe.top_k
    # Any tensors of the right type do as bases; rows are reached by their distance from these.
    base = moe.hidden_state.view(torch.int32)
    scale_base = moe.hidden_state.view(torch.int16).view(moe.scale_dtype)
    bases = (base, scale_base, base.data_ptr(), scale_base.data_ptr())
    common = {
        "HIDDEN": layout.hidden, "INTER": layout.intermediate, "GROUP_WORDS": layout.group // 16,
        "BK": block_k, "BN": block_n, "num_warps": warps,
    }  # fmt: skip
    _gate_up[(triton.cdiv(layout.intermediate, block_n), slots)](
        x, table, ids, moe.hidden_state, *bases,
        TOP_K=moe.top_k, W13=layout.w13_offset, S13=layout.w13_scale_offset, **common,
    )  # fmt: skip
    _down[(triton.cdiv(layout.hidden, block_n), slots)](
        moe.hidden_state, table, ids, weights, moe.partial, *bases,
        W2=layout.w2_offset, S2=layout.w2_scale_offset, **common,
    )  # fmt: skip
    _sum_slots[(triton.cdiv(layout.hidden, 256), m)](
        moe.partial, out, HIDDEN=layout.hidden, TOP_K=moe.top_k, BN=256
    )
