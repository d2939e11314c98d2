"""Decode steps on a GPU attend to the rows where they lie, in the place of SGLang's gather and attention after it.

SGLang counts the selected rows, gathers them into a scratch and calls FlashAttention or FlashInfer, as the GPU has
it. Two launches do all of that here, whatever the GPU and the format. What the kernels do not take goes SGLang's way,
packed rows by the gather of kv_reads.py: a CPU, heads of unusual size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.kernels import kv_attention
from q38.kernels.kv_attention import StoredRows
from q38.sglang_ext.fp8_clamp import fused_kv_attention
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.kv_format import PackedRows
from q38.sglang_ext.targets import SPARSE


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(SPARSE + "._forward_paged_attention", "around", decode),
        Hook(SPARSE + "._try_fused_kv_attention", "around", apart),
    ]


def apart(
    original: Callable[..., torch.Tensor | None],
    self: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    indices: torch.Tensor,
) -> torch.Tensor | None:
    """None: write the step's rows first, then attend by `decode`.

    On compute capability 10 and 12 SGLang's own buffers are written and gathered in one kernel before FlashInfer attends.
    """
    if q.is_cuda:
        queries = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        if rows_of(self, queries, layer, indices) is not None:
            return None
    return fused_kv_attention(original, self, q, k, v, layer, forward_batch, indices)  # type: ignore[no-any-return]


def decode(
    original: Callable[..., torch.Tensor],
    self: Any,
    q: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    topk_indices: torch.Tensor,
) -> torch.Tensor:
    """Attention of query rows [rows, query heads, dim], one selection each: [rows, query heads * dim]."""
    if q.is_cuda and (found := attend(self, q, layer, forward_batch, topk_indices)) is not None:
        return found
    return original(self, q, layer, forward_batch, topk_indices)


def attend(
    backend: Any, q: torch.Tensor, layer: Any, forward_batch: Any, topk_indices: torch.Tensor
) -> torch.Tensor | None:
    """The same from the rows where they lie; None where the kernels do not take them."""
    rows = rows_of(backend, q, layer, topk_indices)
    if rows is None:
        return None
    metadata = backend._resolve_metadata(forward_batch)
    indices = backend._expand_block_indices(topk_indices, metadata).to(torch.int32)
    requests = metadata.row_req_pool_indices
    out = kv_attention.decode_attention(
        q if q.stride(-1) == 1 else q.contiguous(),
        *rows,
        backend.req_to_token_pool.req_to_token,
        forward_batch.req_pool_indices if requests is None else requests,
        indices if indices.stride(-1) == 1 else indices.contiguous(),
        metadata.sequence_lengths,
        layer.scaling,
    )
    return out.flatten(1)


def rows_of(
    backend: Any, q: torch.Tensor, layer: Any, indices: torch.Tensor
) -> tuple[StoredRows, StoredRows] | None:
    """Keys and values of a layer as the kernels read them for queries [rows, query heads, dim]; None where they cannot."""
    if len(indices) != len(q):  # rows that the indexer did not see
        return None
    pool = backend.token_to_kv_pool
    keys, values = (stored_rows(get(layer.layer_id)) for get in (pool.get_key_buffer, pool.get_value_buffer))
    if keys is None or values is None or kv_attention.missing(q, keys):
        return None
    return keys, values


def stored_rows(rows: PackedRows | torch.Tensor) -> StoredRows | None:
    """What the kernels read of keys or values of one layer; None for a buffer of another shape than rows [slots, heads, dim]."""
    if isinstance(rows, PackedRows):
        held = rows.pool.rows[rows.layer][rows.side]
        return StoredRows(held.payload, held.scales, rows.pool.layout.rows, held.tiers)
    return StoredRows(rows, None, None) if rows.ndim == 3 and rows.is_contiguous() else None
