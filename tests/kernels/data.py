"""Small random experts and routing."""

from __future__ import annotations

import torch

from q38.residency.layout import ExpertLayout


def make_rows(
    layout: ExpertLayout,
    experts: int,
    *,
    scale_dtype: torch.dtype = torch.float16,
    seed: int = 0,
    device: str = "cpu",
) -> torch.Tensor:
    """uint8 [experts, row_bytes]: random codes, scales of either sign."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 256, (experts, layout.row_bytes), dtype=torch.uint8, generator=generator)
    for row in rows:
        for name, part in layout.views(row, scale_dtype).items():
            if name.endswith("scale"):
                fan_in = part.shape[0] * layout.group
                part.copy_(torch.randn(part.shape, generator=generator) / fan_in**0.5)
    return rows.to(device)


def make_routing(
    tokens: int, experts: int, top_k: int, *, seed: int = 0, absent: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """ids int32 [tokens, top_k] (a share `absent` of them -1) and weights float32."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
    ids[torch.rand(ids.shape, generator=generator) < absent] = -1
    return ids, torch.rand(tokens, top_k, generator=generator) + 0.1
