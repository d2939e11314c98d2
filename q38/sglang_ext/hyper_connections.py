"""Hyper-connections whose mix is rounded to INT8 as it is loaded, on request.

The two matrices of the mix are 1.3 GB that a token reads in bfloat16, and half of that in INT8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from q38.checkpoint.int8 import round_int8
from q38.checkpoint.packing import pack
from q38.kernels.gated_mix import GatedMix
from q38.kernels.gemv_int8 import gate_columns
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.options import given
from q38.sglang_ext.targets import HYPER

_GROUPS = (128, 64, 32)  # inputs that share a scale, the largest that divides them


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(HYPER + ".GatedResidual.__init__", "after", prepare)]


def prepare(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """One hyper-connection, just built and not loaded yet."""
    options = given()
    if options is not None and options.int8_mixes and hasattr(self, "input_mix_weight_down"):
        _round_mix(self)


class Int8Weight(nn.Module):
    """Takes the place of a linear layer without bias whose matrix is rounded as it arrives.

    Args:
        branches: its outputs are gates of so many: they are stored in the order of `gate_columns`.

    Attributes:
        weight: int32 words [K / 4, N]; loaded from bfloat16 [N, K].
        scales: float16 [K / group, N].
    """

    scales: torch.Tensor

    def __init__(self, linear: nn.Linear, *, branches: int | None = None) -> None:
        super().__init__()
        n, k = linear.weight.shape
        self.group = next(g for g in _GROUPS if k % g == 0)
        self._branches = branches
        device = linear.weight.device
        self.weight = nn.Parameter(
            torch.empty(k // 4, n, dtype=torch.int32, device=device), requires_grad=False
        )
        self.weight.weight_loader = self._load  # type: ignore[attr-defined]
        scales = torch.empty(k // self.group, n, dtype=torch.float16, device=device)
        self.register_buffer("scales", scales, persistent=False)

    def _load(self, _parameter: nn.Parameter, loaded: torch.Tensor) -> None:
        matrix = loaded.to(self.scales.device, torch.float32)  # [N, K]
        if self._branches is not None:
            matrix = matrix[gate_columns(len(matrix), self._branches).to(matrix.device)]
        rounded = round_int8(matrix, self.group)
        self.weight.data.copy_(pack(rounded.codes.T, 8))
        self.scales.copy_(rounded.scales.T)


def _round_mix(self: Any) -> None:
    """Exchange the matrices of one mix; SGLang then finds no kernel for them and calls what it would compile."""
    self.input_mix_weight_down = down = Int8Weight(self.input_mix_weight_down)
    self.input_mix_weight_up = up = Int8Weight(self.input_mix_weight_up, branches=self.hc_count)
    self._jit_mix_ok = False
    made: list[GatedMix] = []

    def mix(normed: torch.Tensor, _down: Any, _up: Any, _branches: int, _hidden: int) -> torch.Tensor:
        if not made:  # the first call is SGLang's warm-up, outside of any graph
            made.append(GatedMix((down.weight.data, down.scales), (up.weight.data, up.scales), self.hc_count))
            made[0].warm_up(normed.dtype)
        return made[0](normed)

    self._mix_compute = mix
