"""The integer formats of a KV cache's rows: bits and groups. Without torch, for whoever only plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class KvFormat:
    """Bits per channel and channels per scale."""

    name: str
    bits: int
    group: int

    @property
    def qmax(self) -> int:
        return (1 << self.bits - 1) - 1

    def payload(self, rows: int, heads: int, dim: int, device: torch.device | str) -> torch.Tensor:
        """Zeroed payload: int8 [rows, heads, dim] or uint8 [rows, heads, dim / 2]."""
        import torch

        if self.bits == 8:
            return torch.zeros(rows, heads, dim, dtype=torch.int8, device=device)
        return torch.zeros(rows, heads, dim // 2, dtype=torch.uint8, device=device)

    def scales(self, rows: int, heads: int, dim: int, device: torch.device | str) -> torch.Tensor:
        """Scales of one, fp16 [rows, heads, dim / group]."""
        import torch

        return torch.ones(rows, heads, dim // self.group, dtype=torch.float16, device=device)


INT8_G64 = KvFormat("int8_g64", 8, 64)
INT4_G32 = KvFormat("int4_g32", 4, 32)
