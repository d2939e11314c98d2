"""The CUDA backend of the dequantizing KV gathers. Kernel: kv_gather.cu; callers: q38.kernels.kv_cache."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from q38.kernels import nvrtc
from q38.model.kv_format import INT8_G64, KvFormat

SOURCE = Path(__file__).with_name("kv_gather.cu")


@dataclass(frozen=True)
class GatherConfig:
    """Rows that a warp reads at a time, warps of a block."""

    rows: int = 2
    warps: int = 2


def missing(kv: KvFormat, out: torch.Tensor) -> str | None:
    """Why the CUDA kernel cannot run here, or None."""
    if out.shape[1] * out.shape[2] % 8 or out.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"rows of {list(out.shape[1:])} {out.dtype}"
    return "no CUDA device" if out.device.type != "cuda" else nvrtc.available()


def defines(
    row: int, kv: KvFormat, config: GatherConfig, dtype: torch.dtype, slot_bytes: int, *, tiered: bool
) -> dict[str, int]:
    """The source's compile-time constants for rows of `row` channels."""
    return {
        "ROW": row,
        "BITS": kv.bits,
        "GROUP": kv.group,
        "RING_GROUP": INT8_G64.group if tiered else 0,
        "ROWS": config.rows,
        "WARPS": config.warps,
        "OUT": dtype.itemsize,
        "ACT_BF16": int(dtype == torch.bfloat16),
        "SLOT_BYTES": slot_bytes,
        "SCALE_BF16": 0,
    }


def gather(
    slots: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    kv: KvFormat,
    out: torch.Tensor,
    ring: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    config: GatherConfig,
) -> None:
    """out[i] = row slots[i]; ring: int8 payload, scales and owners of the tiered format."""
    n, heads, dim = out.shape
    constants = defines(heads * dim, kv, config, out.dtype, slots.itemsize, tiered=ring is not None)
    (kernel,) = nvrtc.load_kernels(SOURCE, constants, ("gather",))
    tiers = ring or (payload, scales, slots)
    kernel.launch(
        (-(-n // (config.rows * config.warps)), 1),
        32 * config.warps,
        (slots, payload, scales, *tiers, out, n, tiers[2].numel()),
        stream=torch.cuda.current_stream(out.device).cuda_stream,
    )
