"""Attention of a decode step straight from the rows of a quantized KV pool: no gather, no scratch of values.

    scores[h, j] = scale * q[r, h] . k[slot(r, j), h // group]        softmax over the valid j, then the sum over v

The positions that a query row selected are divided among programs (flash decoding: Dao et al. 2023), each of which
finds the slots, undoes the rounding and attends; a second launch merges their parts. Softmax and sums are fp32.
Keys and values are rounded to q's dtype as the gathers of q38.kernels.kv_cache round them, and so are the
softmax's weights before they meet the values. Reference: q38.kernels.kv_attention_reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from q38.model.kv_format import INT8_G64, KvFormat

Ring = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # int8 payload, fp16 scales, int32 owner
_DIMS = (64, 128, 256)
_E4M3 = torch.float8_e4m3fn
_PLAIN = (torch.bfloat16, torch.float16, torch.float32, _E4M3)
_FP8 = (8, 9)  # what Triton's conversions from e4m3 need
_MOST_QUERIES = 32
_MOST_SPLITS = 128
_MERGED = 64  # channels of one program of the merge


class StoredRows(NamedTuple):
    """Keys or values of one layer, as a pool holds them.

    payload: int8 [slots, heads, dim], uint8 [slots, heads, dim / 2]; with `kv` None plain numbers [slots, heads, dim],
        bf16, fp16, fp32 or fp8 (e4m3, without a scale).
    scales: fp16 [slots, heads, dim / group], None for plain numbers.
    ring: int8 rows of the newest slots and their owners; `kv` is then INT4_G32. Keys and values share the owners.
    """

    payload: torch.Tensor
    scales: torch.Tensor | None
    kv: KvFormat | None
    ring: Ring | None = None


@dataclass(frozen=True)
class AttentionConfig:
    """Positions that a program handles at a time, its warps, and the most splits of a row (None: see `split`)."""

    block: int = 64
    warps: int = 8
    splits: int | None = None


def missing(q: torch.Tensor, keys: StoredRows) -> str | None:
    """Why the kernels cannot take these queries [rows, query heads, dim], or None."""
    heads, dim = keys.payload.shape[1], q.shape[2]
    if dim not in _DIMS:
        return f"heads of {dim} channels"
    if q.shape[1] % heads or q.shape[1] // heads > _MOST_QUERIES:
        return f"{q.shape[1]} query heads for {heads} KV heads"
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"queries of {q.dtype}"
    stored, device = keys.payload.dtype, keys.payload.device
    if keys.kv is None and stored not in _PLAIN:
        return f"keys of {stored}"
    if stored == _E4M3 and device.type == "cuda" and torch.cuda.get_device_capability(device) < _FP8:
        return f"{stored} before compute capability {_FP8[0]}.{_FP8[1]}"
    return None


def split(topk: int, config: AttentionConfig) -> tuple[int, int]:
    """(blocks of a split, splits of a row), from the width of the selection alone.

    So a captured graph keeps them, and a row's bits do not depend on how many rows are attended beside it. One block
    a split, while there are not too many: all that a program reads is then on its way at once. 2,051 positions of one
    row with two KV heads are 66 programs in blocks of 64, 130 in blocks of 32.
    """
    blocks = max(1, -(-topk // config.block))
    each = -(-blocks // min(config.splits or blocks, _MOST_SPLITS))
    return each, -(-blocks // each)


def decode_attention(
    q: torch.Tensor,
    keys: StoredRows,
    values: StoredRows,
    table: torch.Tensor,
    requests: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    *,
    config: AttentionConfig | None = None,
) -> torch.Tensor:
    """Sparse attention of query rows over the positions that each selected.

    Nothing is read on the host and shapes depend on those of the arguments alone, so a graph can capture it; what it
    allocates belongs to the capture.

    Args:
        q: [rows, query heads, dim], bf16, fp16 or fp32, its last axis contiguous; see `missing` for what fits.
        keys, values: of one layer, in one format.
        table: int32 [requests, context], slot of each position of each request; its last axis contiguous.
        requests: int32 or int64 [rows or more], row of the table of each query row.
        indices: int32 [rows, topk], positions that each row selected, in any order; one that is negative, or not below
            the row's length, or whose slot is negative, does not count. Its last axis contiguous.
        lengths: int32 [rows or more], positions of each row's request.
        scale: of the scores, before the softmax.

    Returns:
        [rows, query heads, dim] of q's dtype, contiguous; zeros for a row without a valid position.
    """
    import triton

    from q38.kernels.kv_attention_triton import attend_split, merge_splits

    config = config or AttentionConfig()
    rows, query_heads, dim = q.shape
    topk, heads = indices.shape[1], keys.payload.shape[1]
    out = torch.empty(rows, query_heads, dim, dtype=q.dtype, device=q.device)
    if rows == 0:
        return out
    each, splits = split(topk, config)
    partial = torch.empty(rows, query_heads, splits, dim, dtype=torch.float32, device=q.device)
    peaks, sums = torch.empty(2, rows, query_heads, splits, dtype=torch.float32, device=q.device)
    kv, ring = keys.kv, keys.ring
    attend_split[(rows, heads, splits)](
        q, *_arguments(keys), *_arguments(values), keys.payload if ring is None else ring[2],
        table, requests, indices, lengths, partial, peaks, sums, scale * math.log2(math.e), topk,
        q.stride(0), q.stride(1), table.stride(0), indices.stride(0),
        RING=0 if ring is None else ring[2].numel(), HEADS=heads, QUERIES=query_heads // heads,
        PADDED=max(16, triton.next_power_of_2(query_heads // heads)), DIM=dim, BITS=0 if kv is None else kv.bits,
        GROUP=dim if kv is None else kv.group, RING_GROUP=INT8_G64.group, BLOCK=config.block, EACH=each,
        COMPILED=q.device.type == "cuda", num_warps=config.warps, num_stages=1,
    )  # fmt: skip
    channels = min(dim, _MERGED)
    merge_splits[(rows, query_heads, dim // channels)](
        partial, peaks, sums, out, splits, DIM=dim, SPLITS=triton.next_power_of_2(splits), CHANNELS=channels,
        num_warps=4,
    )  # fmt: skip
    return out


def _arguments(rows: StoredRows) -> tuple[torch.Tensor, ...]:
    """Payload, scales, and both of the ring; what a format lacks is never read."""
    payload, scales = rows.payload, rows.payload if rows.scales is None else rows.scales
    return (payload, scales, *(rows.ring[:2] if rows.ring else (payload, scales)))
