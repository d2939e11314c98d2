"""The places where SGLang's sparse attention takes rows out of the KV cache: each gathers and undoes the rounding.

decode, verify      qwen_sparse_kv_extraction_compact_triton: the selected rows into the attention's scratch
                    (on a GPU kv_attention.py comes before it and needs no scratch)
prefill, prefix     pack_qsa_prefill_kv: every row of the requests' contexts, in order
CPU                 qsa_sparse_attention: the reference, both of the above

The first chunk of a prompt attends to its fresh keys and values and reads nothing. Other readers (context-parallel
prefill, the fused write of compute capability 10 and 12) do not take a PackedRows and say so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.kernels.kv_select import selected_slots
from q38.kvcache.pool import distinct
from q38.sglang_ext import kv_attention
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.kv_format import PackedRows
from q38.sglang_ext.targets import QSA


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(QSA + ".sparse_attn.qwen_sparse_kv_extraction_compact_triton", "around", compact),
        Hook(QSA + ".sparse_attn.pack_qsa_prefill_kv", "around", pack),
        Hook(QSA + ".kernel.qsa_sparse_attention", "around", attend),
        *kv_attention.hooks(),
    ]


def compact(
    original: Callable[..., None],
    k: Any,
    v: Any,
    req_to_token: torch.Tensor,
    req_indices: torch.Tensor,
    indices: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_k: torch.Tensor,
    out_k: torch.Tensor,
    out_v: torch.Tensor,
    batch: int,
    topk: int,
    zero_fill_cols: int = 0,
) -> None:
    """Selected rows of each query into [batch] runs of the scratch, from cu_k[i] on; see SGLang's docstring.

    Shapes depend on `batch` and `topk` alone and nothing is read on the host, so a graph can capture it.
    """
    if not isinstance(k, PackedRows):
        original(
            k, v, req_to_token, req_indices, indices, seq_lens, cu_k, out_k, out_v, batch, topk,
            zero_fill_cols=zero_fill_cols,
        )  # fmt: skip
        return
    columns = zero_fill_cols or topk
    slots = selected_slots(req_to_token, req_indices, indices[:, :topk], seq_lens, cu_k, batch, columns)
    for rows, out in ((k, out_k), (v, out_v)):
        scratch = out[: batch * columns]
        if zero_fill_cols:  # runs of one stride, which a paged kernel reads to the end
            scratch.zero_()
        rows.gather(slots, scratch)


def pack(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor]],
    *,
    k: Any,
    v: Any,
    req_to_token: torch.Tensor,
    req_indices: torch.Tensor,
    cu_k: torch.Tensor,
    total_k: int,
    max_k: int,
    output_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of whole contexts, one request after the other: [total_k, heads, dim] each."""
    if not isinstance(k, PackedRows):
        return original(
            k=k, v=v, req_to_token=req_to_token, req_indices=req_indices, cu_k=cu_k, total_k=total_k, max_k=max_k,
            output_dtype=output_dtype,
        )  # fmt: skip
    token = torch.arange(total_k, device=cu_k.device)
    request = torch.searchsorted(cu_k[1:].long(), token, right=True)  # [total_k]
    slots = req_to_token[req_indices.long()[request], token - cu_k.long()[request]].long()
    # Contexts grow with every step: sizes that repeat are what torch's allocator can use again.
    size = min(1 << (total_k - 1).bit_length(), max(total_k, req_to_token.shape[1]))
    packed = []
    for rows in (k, v):
        out = torch.empty(size, *rows.shape[1:], dtype=output_dtype or rows.dtype, device=cu_k.device)
        packed.append(rows.gather(slots, out[:total_k]))
    return packed[0], packed[1]


def attend(
    original: Callable[..., torch.Tensor],
    q: torch.Tensor,
    k_cache: Any,
    v_cache: Any,
    token_slots: torch.Tensor,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """The reference attention over the rows that its queries select, each gathered once."""
    if not isinstance(k_cache, PackedRows):
        return original(q, k_cache, v_cache, token_slots, softmax_scale)
    slots, at = distinct(token_slots)
    gathered = [
        rows.gather(slots, torch.empty(len(slots), *rows.shape[1:], dtype=rows.dtype, device=q.device))
        for rows in (k_cache, v_cache)
    ]
    return original(q, *gathered, at, softmax_scale)
