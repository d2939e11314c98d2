"""Decode steps on a GPU attend to the packed rows themselves, in the place of SGLang's gather and attention after it.

SGLang counts the selected rows, gathers them into a scratch and calls FlashAttention or FlashInfer, as the GPU has
it. Two launches do all of that here, whatever the GPU. What the kernels do not take goes SGLang's way, by the gather
of kv_reads.py: plain buffers, a CPU, heads of unusual size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.kernels import kv_attention
from q38.kernels.kv_attention import StoredRows
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.kv_format import PackedRows
from q38.sglang_ext.targets import SPARSE


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(SPARSE + "._forward_paged_attention", "around", decode)]


def decode(
    original: Callable[..., torch.Tensor],
    self: Any,
    q: torch.Tensor,
    layer: Any,
    forward_batch: Any,
    topk_indices: torch.Tensor,
) -> torch.Tensor:
    """Attention of query rows [rows, query heads, dim], one selection each: [rows, query heads * dim]."""
    if q.is_cuda and len(topk_indices) == len(q):
        found = attend(self, q, layer, forward_batch, topk_indices)
        if found is not None:
            return found
    return original(self, q, layer, forward_batch, topk_indices)


def attend(
    backend: Any, q: torch.Tensor, layer: Any, forward_batch: Any, topk_indices: torch.Tensor
) -> torch.Tensor | None:
    """The same over a pool of q38's; None where the pool is another one or the kernels do not take it."""
    pool = backend.token_to_kv_pool
    keys, values = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
    if not (isinstance(keys, PackedRows) and isinstance(values, PackedRows)):
        return None
    stored = stored_rows(keys)
    if kv_attention.missing(q, stored):
        return None
    metadata = backend._resolve_metadata(forward_batch)
    indices = backend._expand_block_indices(topk_indices, metadata).to(torch.int32)
    requests = metadata.row_req_pool_indices
    out = kv_attention.decode_attention(
        q if q.stride(-1) == 1 else q.contiguous(),
        stored,
        stored_rows(values),
        backend.req_to_token_pool.req_to_token,
        forward_batch.req_pool_indices if requests is None else requests,
        indices if indices.stride(-1) == 1 else indices.contiguous(),
        metadata.sequence_lengths,
        layer.scaling,
    )
    return out.flatten(1)


def stored_rows(rows: PackedRows) -> StoredRows:
    """What the kernels read of keys or values of one layer."""
    held = rows.pool.rows[rows.layer][rows.side]
    return StoredRows(held.payload, held.scales, rows.pool.layout.rows, held.tiers)
