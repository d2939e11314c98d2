"""The attention of q38.kernels.kv_attention in plain torch: every selected row gathered, then an ordinary softmax."""

from __future__ import annotations

import torch

from q38.kernels.kv_attention import StoredRows
from q38.kernels.kv_reference import gather_plain, gather_rows


def attention_reference(
    q: torch.Tensor,
    keys: StoredRows,
    values: StoredRows,
    table: torch.Tensor,
    requests: torch.Tensor,
    indices: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """See q38.kernels.kv_attention.decode_attention. Keys and values rounded to q's dtype, all else in float64.

    Returns:
        float64 [rows, query heads, dim].
    """
    rows, query_heads, dim = q.shape
    heads = keys.payload.shape[1]
    out = torch.zeros(rows, query_heads, dim, dtype=torch.float64, device=q.device)
    for row in range(rows):
        slots = valid_slots(table, requests[row], indices[row], lengths[row])
        if not len(slots):
            continue
        k, v = (
            gathered(stored, slots, dim, q.dtype).double() for stored in (keys, values)
        )  # [n, heads, dim]
        queries = q[row].double().view(heads, query_heads // heads, dim)
        weights = torch.softmax(torch.einsum("hgd,nhd->hgn", queries, k) * scale, -1)
        out[row] = torch.einsum("hgn,nhd->hgd", weights, v).reshape(query_heads, dim)
    return out


def valid_slots(
    table: torch.Tensor, request: torch.Tensor, positions: torch.Tensor, length: torch.Tensor
) -> torch.Tensor:
    """Slots of one row's valid positions, in the order of the selection: int64 [n]."""
    positions = positions[(positions >= 0) & (positions < length)].long()
    slots = table[request.long(), positions].long()
    return slots[slots >= 0]


def gathered(rows: StoredRows, slots: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """The rows of some slots, [n, heads, dim] of `dtype`."""
    out = torch.empty(len(slots), rows.payload.shape[1], dim, dtype=dtype, device=rows.payload.device)
    if rows.kv is None:
        return (
            gather_plain(slots, rows.payload, out)
            if rows.payload.itemsize == 1
            else rows.payload[slots].to(dtype)
        )
    assert rows.scales is not None
    return gather_rows(slots, rows.payload, rows.scales, rows.kv, out, rows.ring)
