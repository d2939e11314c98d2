"""The elementwise part of a tuning step as one Triton kernel each: update by the last gradient, then the next weight.

In plain torch a step of SignRound reads and writes about 60 bytes a weight, one of GSQ about 250; here they are
14 and 54 (18 and 72 without the fusion of update and next weight). One program handles a few groups of one expert.
`signround.reference_update` and `gsq.reference_update` are the references.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from q38.quantize.local.grid import limits
from q38.quantize.rtn import MIN_SCALE

if TYPE_CHECKING:
    from q38.quantize.local.gsq import Gsq
    from q38.quantize.local.signround import SignRound

_ROWS = 8  # groups per program
N_ROUNDS = tl.constexpr(
    7
)  # of Philox: the fewest that pass the usual tests of randomness (Salmon et al., 2011)


def signround(
    gradient: torch.Tensor | None,
    state: SignRound,
    weight: torch.Tensor,
    rate: float,
    bits: int,
    group_size: int,
) -> None:
    """Update shift and clip of `state` by a gradient [E, N, K] (None: leave them), then write `state.current`."""
    from q38.quantize.local.signround import CLIP

    low, high = limits(bits)
    experts, groups = len(weight), state.base[0].numel()
    _signround[(triton.cdiv(groups, _ROWS), experts)](
        gradient if gradient is not None else weight, weight, state.shift, state.clip, state.base, state.current,
        groups, rate, CLIP[0], CLIP[1], MIN_SCALE,
        UPDATE=gradient is not None, LOW=low, HIGH=high, GROUP=group_size, ROWS=_ROWS,
    )  # fmt: skip


def gsq(gradient: torch.Tensor | None, state: Gsq, done: int) -> None:
    """Lion on logits and scales of `state` by a gradient [E, N, K] (None: leave them), then write `state.current`."""
    from q38.quantize.local.gsq import BETAS, DECAY, RATE

    experts, groups = len(state.current), state.scale[0].numel()
    size = state.current[0].numel()
    following = done if gradient is None else done + 1
    slope = state.slope(done)
    seeds = torch.tensor(state.seeds, dtype=torch.int32, device=state.scale.device)
    _gsq[(triton.cdiv(groups, _ROWS), experts)](
        gradient if gradient is not None else state.current, state.logits, state.momentum, state.scale,
        state.scale_momentum, state.scale_rate, seeds, state.current,
        groups, state.current.numel(), done, following, *state.heat(done), *state.heat(following),
        RATE * slope, 1 - RATE * DECAY * slope, slope, BETAS[0], BETAS[1],
        UPDATE=gradient is not None, GROUP=size // groups, ROWS=_ROWS,
    )  # fmt: skip


@triton.jit
def _storable(scale, smallest):
    scale = scale.to(tl.float16).to(tl.float32)
    return tl.where(scale < 0, tl.minimum(scale, -smallest), tl.maximum(scale, smallest))


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))


@triton.jit
def _signround(
    gradient, weight, shift, clip, base, out, groups, rate, least, most, smallest,
    UPDATE: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(1).to(tl.int64) * groups + own  # [ROWS]
    some = own < groups
    at = row[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [ROWS, GROUP]
    all_ = some[:, None] & (tl.arange(0, GROUP)[None, :] >= 0)
    w = tl.load(weight + at, mask=all_, other=0).to(tl.float32)
    v = tl.load(shift + at, mask=all_, other=0)
    b = tl.load(base + row, mask=some, other=1)
    c = tl.load(clip + row, mask=some, other=1)
    if UPDATE:
        scale = _storable(b * c, smallest)[:, None]
        scaled = tl.div_rn(w, tl.broadcast_to(scale, (ROWS, GROUP)))
        level = tl.floor(scaled + v + 0.5)
        inside = (level >= LOW) & (level <= HIGH)
        d = tl.load(gradient + at, mask=all_, other=0).to(tl.float32)
        clamped = tl.minimum(tl.maximum(level, LOW), HIGH)
        for_clip = tl.sum(d * (clamped - tl.where(inside, scaled, 0.0)), axis=1) * b
        v -= rate * _sign(tl.where(inside, d * scale, 0.0))
        v = tl.minimum(tl.maximum(v, -0.5), 0.5)
        c -= rate * _sign(for_clip)
        c = tl.minimum(tl.maximum(c, least), most)
        tl.store(shift + at, v, mask=all_)
        tl.store(clip + row, c, mask=some)
    scale = _storable(b * c, smallest)[:, None]
    level = tl.floor(tl.div_rn(w, tl.broadcast_to(scale, (ROWS, GROUP))) + v + 0.5)
    level = tl.minimum(tl.maximum(level, LOW), HIGH)
    tl.store(out + at, (level * scale).to(out.dtype.element_ty), mask=all_)


@triton.jit
def _gumbel(u):
    return -tl.log(-tl.log(tl.minimum(tl.maximum(u, 1e-9), 0.9999999)))


@triton.jit
def _chances(l0, l1, l2, l3, seed, place, tau, kappa):
    """Chances of the four levels under the noise of (seed, place)."""
    u0, u1, u2, u3 = tl.rand4x(seed, place, N_ROUNDS)
    z0 = (kappa * l0 + _gumbel(u0)) / tau
    z1 = (kappa * l1 + _gumbel(u1)) / tau
    z2 = (kappa * l2 + _gumbel(u2)) / tau
    z3 = (kappa * l3 + _gumbel(u3)) / tau
    top = tl.maximum(tl.maximum(z0, z1), tl.maximum(z2, z3))
    e0, e1, e2, e3 = tl.exp(z0 - top), tl.exp(z1 - top), tl.exp(z2 - top), tl.exp(z3 - top)
    total = e0 + e1 + e2 + e3
    return e0 / total, e1 / total, e2 / total, e3 / total


@triton.jit
def _lion(at, value, gradient, momentum, mask, rate, keep, beta1, beta2):
    """One step on `value`, whose momentum lies at `momentum + at`; returns the new value."""
    m = tl.load(momentum + at, mask=mask, other=0).to(tl.float32)
    value = value * keep - rate * _sign(beta1 * m + (1 - beta1) * gradient)
    m = beta2 * m + (1 - beta2) * gradient
    tl.store(momentum + at, m.to(momentum.dtype.element_ty), mask=mask)
    return value


@triton.jit
def _gsq(
    gradient, logits, momentum, scales, scale_momentum, scale_rate, seeds, out,
    groups, plane, done, following, tau, kappa, next_tau, next_kappa, rate, keep, slope, beta1, beta2,
    UPDATE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1)
    row = expert.to(tl.int64) * groups + own  # [ROWS]
    some = own < groups
    column = tl.arange(0, GROUP)[None, :]
    at = row[:, None] * GROUP + column  # [ROWS, GROUP]
    place = own[:, None] * GROUP + column  # inside the expert's matrix, so that batch-mates change nothing
    all_ = some[:, None] & (column >= 0)
    seed = tl.load(seeds + expert)
    plane = plane.to(tl.int64)
    l0 = tl.load(logits + at, mask=all_, other=0)
    l1 = tl.load(logits + plane + at, mask=all_, other=0)
    l2 = tl.load(logits + 2 * plane + at, mask=all_, other=0)
    l3 = tl.load(logits + 3 * plane + at, mask=all_, other=0)
    scale = tl.load(scales + row, mask=some, other=1)
    if UPDATE:
        p0, p1, p2, p3 = _chances(l0, l1, l2, l3, seed + done, place, tau, kappa)
        mean = p3 - p1 - 2 * p0
        d = tl.load(gradient + at, mask=all_, other=0).to(tl.float32)
        for_scale = tl.sum(d * mean, axis=1)
        d = d * scale[:, None] * (kappa / tau)
        l0 = _lion(at, l0, p0 * (-2 - mean) * d, momentum, all_, rate, keep, beta1, beta2)
        l1 = _lion(at, l1, p1 * (-1 - mean) * d, momentum + plane, all_, rate, keep, beta1, beta2)
        l2 = _lion(at, l2, -p2 * mean * d, momentum + 2 * plane, all_, rate, keep, beta1, beta2)
        l3 = _lion(at, l3, p3 * (1 - mean) * d, momentum + 3 * plane, all_, rate, keep, beta1, beta2)
        tl.store(logits + at, l0, mask=all_)
        tl.store(logits + plane + at, l1, mask=all_)
        tl.store(logits + 2 * plane + at, l2, mask=all_)
        tl.store(logits + 3 * plane + at, l3, mask=all_)
        own_rate = tl.load(scale_rate + expert) * slope
        scale = _lion(row, scale, for_scale, scale_momentum, some, own_rate, 1.0, beta1, beta2)
        tl.store(scales + row, scale, mask=some)
    p0, p1, p2, p3 = _chances(l0, l1, l2, l3, seed + following, place, next_tau, next_kappa)
    tl.store(out + at, ((p3 - p1 - 2 * p0) * scale[:, None]).to(out.dtype.element_ty), mask=all_)
