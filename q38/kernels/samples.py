"""Random expert rows and routing for tests, tuning and benchmarks."""

from __future__ import annotations

import torch

from q38.kernels.rows import RowLayout


def random_rows(
    layout: RowLayout,
    count: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    device: torch.device | str = "cuda",
    pinned: bool = False,
    seed: int = 0,
) -> torch.Tensor:
    """uint8 [count, row_bytes]: random codes, signed scales near those of a trained model.

    The scales keep the output of a layer near the size of its input.
    """
    generator = torch.Generator(device="cpu" if pinned else device).manual_seed(seed)
    rows = torch.empty(
        count, layout.row_bytes, dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned
    )
    for start in range(0, count, 512):  # bounds the temporaries of random_
        rows[start : start + 512].view(torch.int32).random_(-(2**31), 2**31, generator=generator)
    for offset, shape, fan_in in (
        (layout.w13_scale_offset, layout.w13_scale_shape, layout.hidden),
        (layout.w2_scale_offset, layout.w2_scale_shape, layout.intermediate),
    ):
        scale = torch.randn(shape, generator=generator, device=generator.device) / fan_in**0.5
        nbytes = 2 * shape[0] * shape[1]
        rows[:, offset : offset + nbytes] = scale.to(scale_dtype).view(-1).view(torch.uint8)
    return rows


def row_addresses(rows: torch.Tensor) -> torch.Tensor:
    """int64 [count] addresses of the rows of one pool, on the CPU."""
    return rows.data_ptr() + torch.arange(rows.shape[0], dtype=torch.int64) * rows.shape[1]


def uniform_routing(
    tokens: int, experts: int, top_k: int, *, device: torch.device | str = "cuda", seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct experts per token, all equally likely; weights that sum to one.

    Returns:
        ids int32 [tokens, top_k] and weights float32 [tokens, top_k].
    """
    generator = torch.Generator(device=device).manual_seed(seed)
    noise = torch.rand(tokens, experts, generator=generator, device=device)
    ids = noise.argsort(dim=1)[:, :top_k].to(torch.int32).contiguous()
    weights = torch.rand(tokens, top_k, generator=generator, device=device) + 0.1
    return ids, weights / weights.sum(dim=1, keepdim=True)
