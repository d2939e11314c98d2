"""SignRound for a batch of matrices: an offset to each rounding and a clipping factor for each scale, by the
signs of their gradients (Cheng et al., arXiv 2309.05516).

    scale = float16(base * clip)        base: the scale to start from, clip in 0.3 .. 1.3
    level = clamp(floor(w / scale + shift + 1/2)), shift in -1/2 .. 1/2

AutoRound tunes one factor for the lowest and one for the highest weight of a group. A symmetric grid has
one scale, set by the side that is larger by magnitude, so one factor says the same.
"""

from __future__ import annotations

import torch

from q38.quantize.local.grid import grouped, limits, storable

CLIP = (0.3, 1.3)
_MOST = 0.02  # of the first rate, for runs of few steps


class SignRound:
    """The state of one batch of matrices.

    Args:
        weight: [E, N, K] in the compute dtype; read only.
        base: float32 [E, N, G], the scales to start from.
        steps: how many times `step` will be called; the rate falls linearly to zero over them.
        rate: the first rate times `steps`: at 1, a shift can just cross its range. At most 0.02 a step.

    Attributes:
        current: [E, N, K] in the compute dtype, the quantized weight after the last step.
    """

    def __init__(
        self, weight: torch.Tensor, base: torch.Tensor, *, bits: int, steps: int, rate: float
    ) -> None:
        self._weight, self._bits, self._steps = weight, bits, steps
        self._group_size = weight.shape[-1] // base.shape[-1]
        self._rate = min(rate / steps, _MOST)
        self.base = base
        self.clip = torch.ones_like(self.base)
        self.shift = torch.zeros(weight.shape, device=weight.device)  # float32
        self.current = torch.empty_like(weight)
        self._apply(None, 0.0)

    def step(self, gradient: torch.Tensor, done: int) -> None:
        """Move against the signs of a gradient [E, N, K] of `current`; `done` steps were taken before."""
        self._apply(gradient, self._rate * (1 - done / self._steps))

    def hard(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Levels int8 [N, K] and storable scales [N, G] of one matrix."""
        scale = storable(self.base[expert] * self.clip[expert])
        levels = _levels(self._weight[expert], scale, self.shift[expert], self._bits)[0]
        return levels.clamp_(*limits(self._bits)).to(torch.int8).flatten(-2), scale

    def _apply(self, gradient: torch.Tensor | None, rate: float) -> None:
        if self._weight.is_cuda:
            from q38.quantize.local.fused import signround

            signround(gradient, self, self._weight, rate, self._bits, self._group_size)
            return
        for e in range(len(self._weight)):  # one by one: what lies between is float32
            if gradient is not None:
                reference_update(self, self._weight, gradient, e, rate, self._bits)
            levels, scale = self.hard(e)
            groups = grouped(levels, scale.shape[-1])
            self.current[e] = (groups * scale.unsqueeze(-1)).flatten(-2)


def reference_update(
    state: SignRound, weight: torch.Tensor, gradient: torch.Tensor, expert: int, rate: float, bits: int
) -> None:
    """One step of one expert in plain torch; the rounding passes its gradient straight through."""
    low, high = limits(bits)
    base, clip, shift = state.base[expert], state.clip[expert], state.shift[expert]
    scale = storable(base * clip)
    rounded, scaled = _levels(weight[expert], scale, shift, bits)  # [N, G, g]
    inside = (rounded >= low) & (rounded <= high)
    passed = grouped(gradient[expert].float(), scale.shape[-1])
    for_clip = (passed * (rounded.clamp(low, high) - torch.where(inside, scaled, 0))).sum(-1) * base
    for_shift = torch.where(inside, passed * scale.unsqueeze(-1), 0).flatten(-2)
    shift.sub_(for_shift.sign_(), alpha=rate).clamp_(-0.5, 0.5)
    clip.sub_(for_clip.sign_(), alpha=rate).clamp_(*CLIP)


def _levels(
    weight: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded levels before clamping, and w / scale: both float32 [N, G, g]."""
    scaled = grouped(weight.float(), scale.shape[-1]) / scale.unsqueeze(-1)
    return torch.floor(scaled + grouped(shift, scale.shape[-1]) + 0.5), scaled
