"""Prefill MoE (more than 16 tokens) over merged 2-bit rows: a grouped matrix product.

CUDA where NVRTC is there and groups are of 128 (moe_prefill_cuda.py), else Triton (this file).

Slots (token, expert) are sorted by expert and cut into blocks of `block_m`, each block of one expert.
The kernels reach the rows through the int64 table: in device memory, or in host memory over the link. Or the
caller copies host rows to the device, a part at a time, and the CUDA kernels take each part when it is there
(`Parts`). No load leaves a row.

Reading order in Triton. Word `kw` holds inputs 16 kw .. 16 kw + 15, so activations are permuted once to
[slot, 16, K / 16]; the product then runs over code position i and word rows, and no tile of codes is
reshaped. Codes become floats by masks: (q | exponent of 128) - 130 is q - 2 in bfloat16, with
1024 and 1026 in float16. A scale is rounded to the dtype of the activations when it is of the other
16-bit type; sums are fp32.
Reference: q38.kernels.reference.moe.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from q38.base.errors import InputError
from q38.kernels import moe_prefill_cuda
from q38.kernels.moe_prefill_cuda import CudaConfig, HopperConfig, MmaConfig, Parts
from q38.kernels.moe_sort import sort_slots
from q38.kernels.rows import RowLayout


@dataclass(frozen=True)
class PrefillConfig:
    """Tiles of the Triton backend: tokens, columns of gate-up and of down, word rows a step."""

    block_m: int = 64
    block_n13: int = 64
    block_n2: int = 128
    block_k: int = 16
    warps: int = 4
    stages: int = 3


def config_of(fields: Mapping[str, Any]) -> PrefillConfig | CudaConfig:
    """The config whose fields a tuned entry holds."""
    if not fields:
        return MmaConfig()
    return HopperConfig(**fields) if "warpgroups" in fields else PrefillConfig(**fields)


@triton.jit
def _weights(words, scale, i: tl.constexpr, dtype: tl.constexpr):
    """(q - 2) * scale of code position i: words [BN, BK] int32, scale [BN, BK] of dtype."""
    code = (words >> (2 * i)) & 3
    if dtype == tl.bfloat16:
        value = (code | 0x4300).to(tl.int16).to(tl.bfloat16, bitcast=True) - 130.0
    else:
        value = (code | 0x6400).to(tl.int16).to(tl.float16, bitcast=True) - 1026.0
    return value.to(dtype) * scale


@triton.jit
def _grouped(
    x, table, order, block_expert, block_start, block_live, out, weights, base, scale_base, base_address, scale_address,
    K: tl.constexpr, N: tl.constexpr, W: tl.constexpr, S: tl.constexpr, TOP_K: tl.constexpr,
    GATED: tl.constexpr, GROUP_WORDS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(1)
    expert = tl.load(block_expert + block)
    if expert >= 0:
        WORDS: tl.constexpr = K // 16
        COLUMNS: tl.constexpr = 2 * N if GATED else N
        dtype: tl.constexpr = x.dtype.element_ty
        row = tl.load(table + expert)
        words_at = base + ((row + W - base_address) >> 4) * 4
        scale_at = scale_base + ((row + S - scale_address) >> 4) * 8
        row_m = tl.arange(0, BM)
        place = tl.load(block_start + block) + row_m  # positions in sorted order
        live_m = row_m < tl.load(block_live + block)
        slot = tl.load(order + place, mask=live_m, other=0)
        source = (slot // TOP_K if GATED else slot).to(tl.int64)  # the token, or the row of h
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        live_n = n < N
        first = tl.zeros([BN, BM], tl.float32)
        second = tl.zeros([BN, BM], tl.float32)
        for k0 in range(0, WORDS, BK):
            kw = k0 + tl.arange(0, BK)
            live_k = kw < WORDS
            live = live_n[:, None] & live_k[None, :]
            at = kw[None, :] * COLUMNS + n[:, None]
            scale_from = (kw // GROUP_WORDS)[None, :] * COLUMNS + n[:, None]
            w = tl.load(words_at + at, mask=live, other=0)  # [BN, BK] int32
            s = tl.load(scale_at + scale_from, mask=live, other=0.0).to(dtype)
            if GATED:
                w2 = tl.load(words_at + at + N, mask=live, other=0)
                s2 = tl.load(scale_at + scale_from + N, mask=live, other=0.0).to(dtype)
            for i in tl.static_range(16):
                values = x + source[None, :] * K + i * WORDS + kw[:, None]
                xi = tl.load(values, mask=live_k[:, None] & live_m[None, :], other=0.0)  # [BK, BM]
                first = tl.dot(_weights(w, s, i, dtype), xi, first)
                if GATED:
                    second = tl.dot(_weights(w2, s2, i, dtype), xi, second)
        to = out + slot.to(tl.int64)[None, :] * N
        if GATED:
            # h is written in the reading order of the next product: input j at (j % 16) * N / 16 + j // 16.
            first = first / (1.0 + tl.exp(-first)) * second
            to += ((n % 16) * (N // 16) + n // 16)[:, None]
        else:
            first *= tl.load(weights + slot, mask=live_m, other=0.0)[None, :]
            to += n[:, None]
        tl.store(to, first.to(out.dtype.element_ty), mask=live_n[:, None] & live_m[None, :])


@triton.jit
def _sum_slots(partial, ids, out, HIDDEN: tl.constexpr, TOP_K: tl.constexpr, BN: tl.constexpr):
    token = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for k in range(TOP_K):
        live = (n < HIDDEN) & (tl.load(ids + token * TOP_K + k) >= 0)
        total += tl.load(partial + (token * TOP_K + k) * HIDDEN + n, mask=live, other=0.0).to(tl.float32)
    tl.store(out + token * HIDDEN + n, total.to(out.dtype.element_ty), mask=n < HIDDEN)


def permute_inputs(x: torch.Tensor) -> torch.Tensor:
    """[rows, K] -> [rows, 16, K / 16]: input 16 kw + i moves to (i, kw). One read and write of x."""
    return x.view(x.shape[0], -1, 16).transpose(1, 2).contiguous()


def moe_prefill(
    x: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layout: RowLayout,
    *,
    scale_dtype: torch.dtype = torch.float16,
    config: PrefillConfig | CudaConfig | None = None,
    backend: Literal["auto", "cuda", "triton"] = "auto",
    parts: Parts | None = None,
) -> torch.Tensor:
    """One MoE layer for any number of tokens.

    Args:
        x: [M, hidden] float16 or bfloat16 (float32 is not taken), contiguous.
        table: int64 [experts], row addresses, multiples of 16.
        ids: int32 [M, top_k]; a negative id contributes nothing.
        weights: float32 [M, top_k].
        scale_dtype: of the scales in the rows.
        config: geometry; that of the Triton backend makes "auto" take Triton.
        backend: "auto" takes CUDA where it can run this shape.
        parts: the experts in another order and in parts, for CUDA alone; the table goes by that order then. The result
            has the same bits.

    Returns:
        [M, hidden] of x's dtype. The contributions of the experts are rounded to it before their fp32 sum.

    Raises:
        InputError: experts not of 2 bits, or a dtype that is not 16 bit.
        ResourceError: the CUDA backend was asked for, by name or by parts, and cannot run here.
    """
    if layout.bits != 2 or x.dtype not in (torch.float16, torch.bfloat16):
        raise InputError(
            f"{layout.bits}-bit experts with {x.dtype}",
            where="prefill kernel",
            remedy="use 2 bits and 16-bit floats",
        )
    triton_config = config if isinstance(config, PrefillConfig) else None
    fits = backend == "auto" and triton_config is None and moe_prefill_cuda.missing(layout, x.device) is None
    if backend == "cuda" or parts is not None or fits:
        cuda_config = None if isinstance(config, PrefillConfig) else config
        return moe_prefill_cuda.run(x, table, ids, weights, layout, scale_dtype, cuda_config, parts)
    c = triton_config or PrefillConfig()
    m, top_k = ids.shape
    slots = m * top_k
    order, block_expert, block_start, block_live, *_ = sort_slots(ids, table.numel(), c.block_m)
    h = torch.empty(slots, layout.intermediate, dtype=x.dtype, device=x.device)
    partial = torch.empty(slots, layout.hidden, dtype=x.dtype, device=x.device)
    out = torch.empty_like(x)
    words = order.view(-1)
    scale_base = h.view(scale_dtype)
    bases = (words, scale_base, words.data_ptr(), scale_base.data_ptr())
    common = {
        "TOP_K": top_k, "GROUP_WORDS": layout.group // 16, "BM": c.block_m, "BK": c.block_k,
        "num_warps": c.warps, "num_stages": c.stages,
    }  # fmt: skip
    _grouped[(triton.cdiv(layout.intermediate, c.block_n13), block_expert.numel())](
        permute_inputs(x), table, order, block_expert, block_start, block_live, h, weights, *bases,
        K=layout.hidden, N=layout.intermediate, W=layout.w13_offset, S=layout.w13_scale_offset,
        GATED=True, BN=c.block_n13, **common,
    )  # fmt: skip
    _grouped[(triton.cdiv(layout.hidden, c.block_n2), block_expert.numel())](
        h, table, order, block_expert, block_start, block_live, partial, weights, *bases,
        K=layout.intermediate, N=layout.hidden, W=layout.w2_offset, S=layout.w2_scale_offset,
        GATED=False, BN=c.block_n2, **common,
    )  # fmt: skip
    _sum_slots[(triton.cdiv(layout.hidden, 1024), m)](
        partial, ids, out, HIDDEN=layout.hidden, TOP_K=top_k, BN=1024
    )
    return out
