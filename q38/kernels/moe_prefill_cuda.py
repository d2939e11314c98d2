"""The CUDA backend of the prefill MoE: pack, gate-up, pack, down, sum. Kernels: moe_prefill.cu."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from q38.base.errors import ResourceError
from q38.kernels import nvrtc
from q38.kernels.rows import RowLayout

SOURCE = Path(__file__).with_name("moe_prefill.cu")
BLOCK_TOKENS, WARPS, WARP_COLUMNS = 64, 4, {True: 32, False: 64}  # as in the source; columns by GATED


def missing(layout: RowLayout, x: torch.Tensor) -> str | None:
    """Why the CUDA kernels cannot run here, or None."""
    if layout.group != 128:
        return f"groups of {layout.group}, not 128"
    return "no CUDA device" if x.device.type != "cuda" else nvrtc.available()


def defines(
    layout: RowLayout, top_k: int, gated: bool, dtype: torch.dtype, scale_dtype: torch.dtype
) -> dict[str, int]:
    """The source's compile-time constants for one of the two products."""
    sizes = (layout.hidden, layout.intermediate)
    inputs, outputs = sizes if gated else sizes[::-1]
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "GATED": int(gated),
        "TOP_K": top_k,
        "W_OFFSET": layout.w13_offset if gated else layout.w2_offset,
        "S_OFFSET": layout.w13_scale_offset if gated else layout.w2_scale_offset,
        "SCALE_BF16": int(scale_dtype == torch.bfloat16),
        "ACT_BF16": int(dtype == torch.bfloat16),
    }


def run(
    x: torch.Tensor,
    table: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    layout: RowLayout,
    scale_dtype: torch.dtype,
) -> torch.Tensor:
    """moe_prefill for arguments that it has checked.

    Raises:
        ResourceError: the kernels cannot run here.
    """
    from q38.kernels.moe_prefill import sort_slots

    if (reason := missing(layout, x)) is not None:
        raise ResourceError(reason, where="prefill kernel", remedy="use the Triton backend")
    m, top_k = ids.shape
    stream = torch.cuda.current_stream(x.device).cuda_stream
    plan = sort_slots(ids, table.numel(), BLOCK_TOKENS)
    order, block_expert, block_start, end = plan
    blocks = block_expert.numel()

    def product(source: torch.Tensor, gated: bool) -> torch.Tensor:
        constants = defines(layout, top_k, gated, x.dtype, scale_dtype)
        pack, grouped = nvrtc.load_kernels(SOURCE, constants, ("pack", "grouped"))
        rows, inputs, outputs = source.shape[0], constants["INPUTS"], constants["OUTPUTS"]
        packed = torch.empty(rows, inputs // 2, dtype=torch.int32, device=x.device)
        back = torch.empty(rows, dtype=torch.float32, device=x.device)
        out = torch.empty(m * top_k, outputs, dtype=x.dtype, device=x.device)
        pack.launch((rows, 1), 32 * min(32, inputs // 128), (source, packed, back), stream=stream)
        columns = WARPS * WARP_COLUMNS[gated]
        arguments: Sequence[Any] = (packed, back, table, order, block_expert, block_start, end, weights, out)
        grouped.launch((-(-outputs // columns), blocks), 32 * WARPS, arguments, stream=stream)
        return out

    partial = product(product(x, True), False)
    (sum_slots,) = nvrtc.load_kernels(
        SOURCE, defines(layout, top_k, False, x.dtype, scale_dtype), ("sum_slots",)
    )
    out = torch.empty_like(x)
    sum_slots.launch((m, -(-layout.hidden // 256)), 128, (partial, ids, out), stream=stream)
    return out
