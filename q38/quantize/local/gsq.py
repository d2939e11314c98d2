"""Gumbel-softmax choice of the level of every weight, with its scale, for a batch of matrices.

After GSQ (arXiv 2604.18556): each weight has one logit per level. A step draws Gumbel noise g, takes

    p = softmax((kappa * logit + g) / tau),   weight = scale * sum of p * level

and moves logits and scales by Lion. tau falls and kappa rises, so that the choice hardens; the result is the
likeliest level. Figures (start of the logits, tau, kappa, rate, weight decay) are those of the paper's code; the
rate of the scales, which it leaves to each model, is relative to the mean scale of the expert.
"""

from __future__ import annotations

import math

import torch

from q38.quantize.local.grid import grouped, limits, storable

TAU = (2.0, 0.05)
KAPPA = (100.0, 500.0)
STEPS = 400  # that RATE and SCALE_RATE are meant for: a logit can then just cross from one level to the next
RATE = 1e-4
SCALE_RATE = 1e-2
DECAY = 1.0
BETAS = (0.9, 0.95)
LEVELS = 4  # of 2 bits: the only width with a kernel
_START, _SHARPNESS = 0.01, 6.0
_TINY = 1e-9
_SPAN = (-2, 2)


class Gsq:
    """The state of one batch of matrices.

    Args:
        levels: int8 [E, N, K] to start from.
        scale: float32 [E, N, G] to start from.
        seeds: one per expert.
        steps: how many times `step` will be called.
        dtype: of `current`, and of the momenta of the logits.

    Attributes:
        logits: float32 [4, E, N, K].
        current: [E, N, K] in `dtype`, the softened weight for the next step.
    """

    def __init__(
        self,
        levels: torch.Tensor,
        scale: torch.Tensor,
        seeds: list[int],
        *,
        bits: int,
        steps: int,
        dtype: torch.dtype,
    ) -> None:
        if bits != 2:
            raise ValueError(f"{bits} bits: the levels are those of 2 bits")
        self._bits, self._steps, self.seeds = bits, steps, seeds
        device = levels.device
        self.logits = torch.empty(LEVELS, *levels.shape, device=device)
        self.momentum = torch.zeros(self.logits.shape, dtype=dtype, device=device)
        self.scale = scale.clone()
        self.scale_momentum = torch.zeros_like(scale)
        self.scale_rate = SCALE_RATE * scale.abs().mean(dim=(1, 2))  # [E]
        self._generators = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        for e, generator in enumerate(self._generators):
            self.logits[:, e] = start_logits(levels[e], bits, generator)
        self.current = torch.empty(levels.shape, dtype=dtype, device=device)
        self._chances: list[torch.Tensor] = []  # of the last draw; the kernel draws again instead
        self._apply(None, 0)

    def step(self, gradient: torch.Tensor, done: int) -> None:
        """One step of Lion for a gradient [E, N, K] of `current`; `done` steps were taken before."""
        self._apply(gradient, done)

    def hard(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest levels int8 [N, K] and the storable scales [N, G] of one matrix."""
        levels = self.logits[:, expert].argmax(0).to(torch.int8) + limits(self._bits)[0]
        return levels, storable(self.scale[expert])

    def heat(self, step: int) -> tuple[float, float]:
        """(tau, kappa) of a step."""
        part = min(step / self._steps, 1.0)
        return TAU[0] + (TAU[1] - TAU[0]) * part, KAPPA[0] + (KAPPA[1] - KAPPA[0]) * part

    def slope(self, step: int) -> float:
        """Factor of the rates: half a cosine to 0, and longer strides for fewer steps than the paper's."""
        return 0.5 * (1 + math.cos(math.pi * step / self._steps)) * STEPS / self._steps

    def _apply(self, gradient: torch.Tensor | None, done: int) -> None:
        if self.logits.is_cuda:
            from q38.quantize.local.fused import gsq

            gsq(gradient, self, done)
            return
        following = done if gradient is None else done + 1
        tau, kappa = self.heat(following)
        for e, generator in enumerate(self._generators):
            if gradient is not None:
                reference_update(self, self._chances[e], gradient[e], e, done)
            noise = torch.rand(self.logits[:, e].shape, generator=generator).clamp_(_TINY, 1 - 1e-7)
            noise.log_().neg_().log_().neg_()  # Gumbel
            chances = choose(self.logits[:, e], noise, tau, kappa)
            self.current[e] = soften(chances, self.scale[e])
            if len(self._chances) < len(self._generators):
                self._chances.append(chances)
            else:
                self._chances[e] = chances


def start_logits(levels: torch.Tensor, bits: int, generator: torch.Generator) -> torch.Tensor:
    """Logits float32 [4, N, K] that favour the given levels, falling with the square of the distance from them."""
    each = torch.arange(limits(bits)[0], limits(bits)[1] + 1, device=levels.device).view(-1, 1, 1)
    distance = (each - levels.float()).square_().div_(-2)
    distance -= distance.mean(0)
    noise = torch.randn(distance.shape, generator=generator, device=levels.device)
    return noise.add_(distance, alpha=_SHARPNESS).mul_(_START)


def choose(logits: torch.Tensor, noise: torch.Tensor, tau: float, kappa: float) -> torch.Tensor:
    """Chances of the levels [4, N, K] under Gumbel noise."""
    return torch.softmax(torch.add(noise, logits, alpha=kappa).div_(tau), dim=0)


def soften(chances: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The expected weight [N, K]: chances [4, N, K], scales [N, G]."""
    mean = grouped(_mean_level(chances), scale.shape[-1])
    return (mean * scale.unsqueeze(-1)).flatten(-2)


def reference_update(
    state: Gsq, chances: torch.Tensor, gradient: torch.Tensor, expert: int, done: int
) -> None:
    """One step of one expert in plain torch: the gradient of `soften(choose(...))`, then Lion."""
    tau, kappa = state.heat(done)
    scale, slope = state.scale[expert], state.slope(done)
    groups = scale.shape[-1]
    mean = _mean_level(chances)  # [N, K]
    passed = gradient.float()
    for_scale = grouped(passed * mean, groups).sum(-1)
    per_level = (grouped(passed, groups) * scale.unsqueeze(-1)).flatten(-2) * (kappa / tau)
    for_logits = torch.empty_like(chances)
    for chance, level, out in zip(chances, range(*_SPAN), for_logits, strict=True):
        torch.mul(level - mean, chance, out=out).mul_(per_level)
    logits, momentum = state.logits[:, expert], state.momentum[:, expert]
    logits.mul_(1 - RATE * DECAY * slope)
    _lion(logits, momentum, for_logits, RATE * slope)
    _lion(scale, state.scale_momentum[expert], for_scale, float(state.scale_rate[expert]) * slope)


def _lion(value: torch.Tensor, momentum: torch.Tensor, gradient: torch.Tensor, rate: float) -> None:
    """Chen et al., arXiv 2302.06675."""
    value.sub_(momentum.float().mul(BETAS[0]).add_(gradient, alpha=1 - BETAS[0]).sign_(), alpha=rate)
    momentum.mul_(BETAS[1]).add_(gradient, alpha=1 - BETAS[1])


def _mean_level(chances: torch.Tensor) -> torch.Tensor:
    """[N, K]: the levels are -2, -1, 0 and 1."""
    return chances[3] - chances[1] - 2 * chances[0]
