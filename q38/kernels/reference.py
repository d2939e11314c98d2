"""Plain torch references. Slow, short, and what every kernel is tested against.

Formats: AutoRound 0.16.1's `auto_gptq` packing; a weight is (code - 2**(bits - 1)) * scale, scales signed.
"""

from __future__ import annotations

import torch

from q38.kernels.rows import RowLayout


def unpack_codes(words: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [K * bits / 32, N] -> int32 codes [K, N], code k of a word at bits `bits * k`."""
    per_word = 32 // bits
    shifts = torch.arange(per_word, device=words.device, dtype=torch.int32) * bits
    codes: torch.Tensor = (words[:, None, :] >> shifts[None, :, None]) & (
        2**bits - 1
    )  # [K/per_word, per_word, N]
    return codes.reshape(words.shape[0] * per_word, words.shape[1])


def dequantize_words(
    words: torch.Tensor, scales: torch.Tensor, bits: int, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Packed matrix [K * bits / 32, N] with scales [K / group, N] -> weights [K, N] of `dtype`."""
    codes = unpack_codes(words, bits) - 2 ** (bits - 1)
    wide = scales.to(dtype).repeat_interleave(codes.shape[0] // scales.shape[0], dim=0)
    return torch.mul(codes.to(dtype), wide)


def part(row: torch.Tensor, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """One tensor inside a uint8 row."""
    return row[offset : offset + shape[0] * shape[1] * dtype.itemsize].view(dtype).view(shape)


def dequantize_row(
    row: torch.Tensor, layout: RowLayout, scale_dtype: torch.dtype, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [row_bytes] -> w13 [hidden, 2 * intermediate] and w2 [intermediate, hidden]."""
    w13 = part(row, layout.w13_offset, layout.w13_shape, torch.int32)
    w2 = part(row, layout.w2_offset, layout.w2_shape, torch.int32)
    s13 = part(row, layout.w13_scale_offset, layout.w13_scale_shape, scale_dtype)
    s2 = part(row, layout.w2_scale_offset, layout.w2_scale_shape, scale_dtype)
    return dequantize_words(w13, s13, layout.bits, dtype), dequantize_words(w2, s2, layout.bits, dtype)


def moe(
    x: torch.Tensor,
    rows: list[torch.Tensor],
    ids: torch.Tensor,
    weights: torch.Tensor,
    layout: RowLayout,
    scale_dtype: torch.dtype,
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """out[m] = sum over k of weights[m, k] * down(silu(gate(x[m])) * up(x[m])) of expert ids[m, k].

    Args:
        x: [M, hidden].
        rows: one uint8 row per expert, anywhere.
        ids: int [M, top_k]; a negative id contributes nothing.
        weights: float32 [M, top_k].

    Returns:
        [M, hidden] of `dtype`, on x's device, not rounded to x's dtype.
    """
    x = x.to(dtype)
    out = torch.zeros_like(x)
    for expert in torch.unique(ids[ids >= 0]).tolist():
        w13, w2 = dequantize_row(rows[expert].to(x.device), layout, scale_dtype, dtype)
        token, k = torch.nonzero(ids == expert, as_tuple=True)
        gate, up = (x[token] @ w13).chunk(2, dim=1)
        h = torch.nn.functional.silu(gate) * up
        out.index_add_(0, token, (h @ w2) * weights[token, k].to(dtype)[:, None])
    return out


def gemv_int8(
    x: torch.Tensor, words: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """x [M, K] times an 8-bit matrix: words int32 [K / 4, N], scales [K / group, N] -> [M, N]."""
    return x.to(dtype) @ dequantize_words(words, scales, 8, dtype)


def relative_error(value: torch.Tensor, exact: torch.Tensor) -> float:
    """|value - exact| / |exact| in the Euclidean norm, computed in float64. NaN when anything is NaN."""
    difference = value.double() - exact.double().to(value.device)
    return float(difference.norm() / exact.double().norm().clamp_min(1e-300))
