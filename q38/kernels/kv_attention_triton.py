"""The two Triton kernels of q38.kernels.kv_attention.

BITS says how a row is stored: 8 and 4 with scales (q38.kernels.kv_formats), 0 as plain numbers. Peaks are base-2
logarithms: scores come scaled by log2(e), so that exp2 serves.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(payload, scales, row, live, DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr):
    """Rows as they are stored: codes [N, bytes] and scales [N, groups], or plain [N, DIM] twice."""
    if BITS == 0:
        plain = tl.load(
            payload + row[:, None] * DIM + tl.arange(0, DIM)[None, :], mask=live[:, None], other=0.0
        )
        return plain, plain
    else:
        GROUPS: tl.constexpr = DIM // GROUP
        BYTES: tl.constexpr = DIM * BITS // 8
        codes = tl.load(
            payload + row[:, None] * BYTES + tl.arange(0, BYTES)[None, :], mask=live[:, None], other=0
        )
        scale = tl.load(
            scales + row[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :], mask=live[:, None], other=0.0
        )
        return codes, scale


@triton.jit
def _arrived(codes, COMPILED: tl.constexpr):
    """The same codes. Moves of lanes that the compiler would put at their load, and a wait with them, stay below this."""
    if COMPILED and codes.dtype.primitive_bitwidth == 8:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [codes], dtype=codes.dtype, is_pure=False, pack=4
        )
    else:
        return codes


@triton.jit
def _values(codes, scale, N: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, BITS: tl.constexpr, DTYPE: tl.constexpr):  # fmt: skip
    """[N, DIM] of DTYPE, rounded once from code * scale in fp32, as the gathers do."""
    if BITS == 0:
        return codes.to(DTYPE)
    else:
        wide = scale.to(tl.float32)[:, :, None]
        code = codes.reshape(N, DIM // GROUP, GROUP * BITS // 8)
        if BITS == 8:
            return (code.to(tl.float32) * wide).to(DTYPE).reshape(N, DIM)
        else:
            byte = code.to(tl.int32)
            even = ((byte & 15).to(tl.float32) - 8.0) * wide
            odd = ((byte >> 4).to(tl.float32) - 8.0) * wide
            return tl.join(even.to(DTYPE), odd.to(DTYPE)).reshape(N, DIM)


@triton.jit(do_not_specialize=["topk"])
def attend_split(
    q, keys, key_scales, key_ring, key_ring_scales, values, value_scales, value_ring, value_ring_scales, owner,
    table, requests, indices, lengths, partial, peaks, sums, scale, topk, q_row, q_head, table_row, index_row,
    RING: tl.constexpr, HEADS: tl.constexpr, QUERIES: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, RING_GROUP: tl.constexpr, BLOCK: tl.constexpr,
    EACH: tl.constexpr, COMPILED: tl.constexpr,
):  # fmt: skip
    """One query row, the QUERIES heads of one KV head, EACH blocks of selected positions."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    DTYPE: tl.constexpr = q.dtype.element_ty
    query = tl.arange(0, PADDED)
    channel = tl.arange(0, DIM)
    wanted = query < QUERIES
    query_head = head * QUERIES + query
    length = tl.load(lengths + row)
    slots = table + tl.load(requests + row).to(tl.int64) * table_row
    queries = tl.load(
        q + row * q_row + query_head[:, None] * q_head + channel[None, :], mask=wanted[:, None], other=0.0
    )
    peak = tl.full([PADDED], float("-inf"), tl.float32)
    total = tl.zeros([PADDED], tl.float32)
    out = tl.zeros([PADDED, DIM], tl.float32)
    for i in range(EACH):
        column = (split * EACH + i) * BLOCK + tl.arange(0, BLOCK)
        position = tl.load(indices + row * index_row + column, mask=column < topk, other=-1)
        live = (position >= 0) & (position < length)
        slot = tl.load(slots + tl.where(live, position, 0), mask=live, other=-1).to(tl.int64)
        live = slot >= 0
        stored = slot * HEADS + head
        cold = live
        if RING > 0:
            place = slot % RING
            hot = live & (tl.load(owner + place, mask=live, other=-1) == slot)
            cold = live & (hot == 0)
            in_ring = place * HEADS + head
            key8, key_scale8 = _load(key_ring, key_ring_scales, in_ring, hot, DIM, RING_GROUP, 8)
        key, key_scale = _load(keys, key_scales, stored, cold, DIM, GROUP, BITS)
        # Values are on their way while the keys are at work.
        if RING > 0:
            value8, value_scale8 = _load(value_ring, value_ring_scales, in_ring, hot, DIM, RING_GROUP, 8)
        value, value_scale = _load(values, value_scales, stored, cold, DIM, GROUP, BITS)

        key = _arrived(key, COMPILED)
        value = _arrived(value, COMPILED)
        if RING > 0:
            key8 = _arrived(key8, COMPILED)
            value8 = _arrived(value8, COMPILED)
        k = _values(key, key_scale, BLOCK, DIM, GROUP, BITS, DTYPE)
        if RING > 0:
            k = tl.where(hot[:, None], _values(key8, key_scale8, BLOCK, DIM, RING_GROUP, 8, DTYPE), k)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee") * scale  # [PADDED, BLOCK]
        scores = tl.where(live[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # nothing valid so far: every weight is 0
        weights = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        v = _values(value, value_scale, BLOCK, DIM, GROUP, BITS, DTYPE)
        if RING > 0:
            v = tl.where(hot[:, None], _values(value8, value_scale8, BLOCK, DIM, RING_GROUP, 8, DTYPE), v)
        out = tl.dot(weights.to(DTYPE), v, out * fade[:, None], input_precision="ieee")
        total = total * fade + tl.sum(weights, 1)
        peak = higher
    at = (row * (HEADS * QUERIES) + query_head) * splits + split  # [rows, query heads, splits]
    tl.store(peaks + at, peak, mask=wanted)
    tl.store(sums + at, total, mask=wanted)
    tl.store(partial + at[:, None] * DIM + channel[None, :], out, mask=wanted[:, None])


@triton.jit(do_not_specialize=["splits"])
def merge_splits(partial, peaks, sums, out, splits, DIM: tl.constexpr, SPLITS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """CHANNELS channels of one query head of one row; zeros where no split had a valid position."""
    head = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split = tl.arange(0, SPLITS)
    channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    there = split < splits
    at = head * splits + split
    part = tl.load(partial + at[:, None] * DIM + channel[None, :], mask=there[:, None], other=0.0)
    peak = tl.load(peaks + at, mask=there, other=float("-inf"))
    total = tl.load(sums + at, mask=there, other=0.0)
    highest = tl.max(peak, 0)
    share = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))  # [SPLITS]
    whole = tl.sum(share * total, 0)
    mixed = tl.sum(share[:, None] * part, 0)
    mixed = mixed / tl.where(whole == 0, 1.0, whole)
    tl.store(out + head * DIM + channel, mixed.to(out.dtype.element_ty))
