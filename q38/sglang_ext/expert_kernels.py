"""The routed experts of one layer, computed from their rows: decode kernel, prefill kernel, or the CPU reference."""

from __future__ import annotations

import torch

from q38.kernels import configs, reference
from q38.kernels.moe_decode import MAX_TOKENS, DecodeConfig, MoeDecode
from q38.kernels.moe_prefill import PrefillConfig, config_of, moe_prefill
from q38.kernels.moe_prefill_cuda import CudaConfig
from q38.kernels.rows import RowLayout
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
    if x.shape[0] > MAX_TOKENS and x.device.type == "cuda":
        return _prefill(stored, layer, x, ids, weights)
    stored.traffic.add("decode" if x.shape[0] <= MAX_TOKENS else "prefill", layer, ids)
    if x.device.type != "cuda":
        return _run_reference(stored, table, x, ids, weights)
    return _decode(stored, ids.shape[1], x.dtype, x.device)(x, table, ids, weights)


def _prefill(
    stored: ExpertRows, layer: int, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    staged = None if stored.staging is None else stored.staging.layer(layer, len(x))
    if staged is None:
        stored.traffic.add("prefill", layer, ids)
        table, parts = stored.table(layer), None
    else:
        stored.traffic.add_staged(layer, ids, staged.host_rows)
        table, parts = staged.table, staged.parts
    config = _prefill_config(stored, ids.shape[1], len(x), x.device)
    return moe_prefill(
        x, table, ids, weights, stored.layout, scale_dtype=stored.scale_dtype, config=config, parts=parts
    )


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
        host_rows = not stored.cache.resident.all()
        _decoders[key] = MoeDecode(
            stored.layout,
            top_k,
            dtype=dtype,
            scale_dtype=stored.scale_dtype,
            # Tuned with all rows in device memory; over the link another geometry is the faster one by a third.
            configs=None if host_rows else decode_configs(stored.layout, top_k, device),
            host_rows=host_rows,
            device=device,
        )
    return _decoders[key]


def decode_configs(layout: RowLayout, top_k: int, device: torch.device) -> dict[int, DecodeConfig]:
    """The tuned geometry for this device by token count; empty where there is none."""
    return {
        tokens: DecodeConfig(**entry.config)
        for tokens in range(1, MAX_TOKENS + 1)
        if (entry := _tuned("decode", layout, top_k, tokens, device)) is not None
    }


def _prefill_config(
    stored: ExpertRows, top_k: int, tokens: int, device: torch.device
) -> PrefillConfig | CudaConfig | None:
    """The same for one token count; None for the default. Looked up once for each."""
    key = (top_k, tokens)
    if key not in _prefill_configs:
        entry = _tuned("prefill", stored.layout, top_k, tokens, device)
        _prefill_configs[key] = None if entry is None else config_of(entry.config)
    return _prefill_configs[key]


_prefill_configs: dict[tuple[int, int], PrefillConfig | CudaConfig | None] = {}


def _tuned(
    kernel: str, layout: RowLayout, top_k: int, tokens: int, device: torch.device
) -> configs.Entry | None:
    found = configs.in_use(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    shape = {
        "hidden": layout.hidden, "intermediate": layout.intermediate, "group": layout.group, "top_k": top_k,
    }  # fmt: skip
    return None if found is None else found.find(kernel, shape, tokens)


def _run_reference(
    stored: ExpertRows, table: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    size = stored.layout.row_bytes
    memory = [memory_at(address, size) for address in table.tolist()]
    out = reference.moe(x, memory, ids, weights, stored.layout, stored.scale_dtype, torch.float32)
    return out.to(x.dtype)
