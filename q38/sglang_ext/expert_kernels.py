"""The routed experts of one layer, computed from their rows: decode kernel, prefill kernel, or the CPU reference."""

from __future__ import annotations

import torch

from q38.kernels import reference
from q38.kernels.moe_decode import MAX_TOKENS, MoeDecode
from q38.kernels.moe_prefill import moe_prefill
from q38.sglang_ext.host_memory import memory_at
from q38.sglang_ext.residency import ExpertRows


def run(
    stored: ExpertRows, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """One layer: the decode kernel up to 16 tokens, the prefill kernel beyond, the reference on a CPU.

    Args:
        x: [M, hidden] bfloat16 or float16, contiguous. ids: int32 [M, top_k]. weights: float32 [M, top_k].
    """
    table, ids, weights = stored.table(layer), ids.contiguous(), weights.contiguous()
    decodes = x.shape[0] <= MAX_TOKENS
    stored.traffic.add("decode" if decodes else "prefill", layer, ids)
    if x.device.type != "cuda":
        return _run_reference(stored, table, x, ids, weights)
    if decodes:
        return _decode(stored, ids.shape[1], x.dtype, x.device)(x, table, ids, weights)
    return moe_prefill(x, table, ids, weights, stored.layout, scale_dtype=stored.scale_dtype)


def compile_decode(stored: ExpertRows, top_k: int, dtype: torch.dtype, device: torch.device) -> None:
    """Make the decode kernel's buffers and compile it for every token count, before any graph is captured."""
    decode = _decode(stored, top_k, dtype, device)
    if decode.backend == "cuda":
        for tokens in range(1, MAX_TOKENS + 1):
            decode.launch_for(tokens)


_decoders: dict[tuple[int, torch.dtype], MoeDecode] = {}


def _decode(stored: ExpertRows, top_k: int, dtype: torch.dtype, device: torch.device) -> MoeDecode:
    """One set of buffers for all layers: they run one after the other on one stream."""
    key = (top_k, dtype)
    if key not in _decoders:
        _decoders[key] = MoeDecode(
            stored.layout,
            top_k,
            dtype=dtype,
            scale_dtype=stored.scale_dtype,
            host_rows=not stored.cache.resident.all(),
            device=device,
        )
    return _decoders[key]


def _run_reference(
    stored: ExpertRows, table: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    size = stored.layout.row_bytes
    memory = [memory_at(address, size) for address in table.tolist()]
    out = reference.moe(x, memory, ids, weights, stored.layout, stored.scale_dtype, torch.float32)
    return out.to(x.dtype)
