"""The Triton kernel of q38.kernels.kv_select."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["columns"])
def select(
    table, requests, indices, lengths, starts, slots, columns, table_stride, index_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    query = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(starts + query).to(tl.int64)
    run = tl.load(starts + query + 1).to(tl.int64) - start
    length = tl.load(lengths + query)
    row = tl.load(requests + query).to(tl.int64)
    position = tl.load(
        indices + query.to(tl.int64) * index_stride + column, mask=column < columns, other=-1
    ).to(tl.int64)
    valid = (column < run) & (position >= 0) & (position < length)
    slot = tl.load(table + row * table_stride + tl.where(valid, position, 0), mask=valid, other=-1)
    tl.store(slots + start + column, slot.to(tl.int64), mask=valid)
