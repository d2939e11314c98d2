"""Block-wise SignRound, for comparison: all experts of a block together, on the block's summed expert output."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from q38.quantize.local import grid, moe
from q38.quantize.local.signround import SignRound
from q38.quantize.local.tokens import Routed
from q38.quantize.local.tune import Weights
from q38.quantize.local.walk import add_expert

if TYPE_CHECKING:
    from benchmarks.quantize_block import Bench

_SAMPLES = 8  # sequences per step, AutoRound's default
_TOGETHER = 32  # experts in one product


def block_wise(bench: Bench, block: int, routed: Routed, judged: Routed, *, steps: int) -> dict[str, Any]:
    """Tune shift and clip of every expert's rounding by the gradient of the squared error of their sum.

    The block's output is linear in that sum, so this is the error AutoRound's block-wise mode reduces. The last state
    is kept.
    """
    torch.use_deterministic_algorithms(False)  # index_add would sort
    begun = bench.sync()
    experts = list(range(bench.plan.shape.num_experts))
    weights = bench.walk.experts(block, experts, bench.device)
    size = bench.plan.group_size
    scales = [torch.stack([grid.plain_scales(m, 2, size) for m in w]) for w in weights]
    rounders = [SignRound(w, s, bits=2, steps=steps, rate=1.0) for w, s in zip(weights, scales, strict=True)]
    target = torch.zeros_like(routed.hidden)
    for e in experts:
        add_expert(target, routed, e, weights.gate_up[e], weights.down[e])
    length = bench.args.seqlen
    samples = len(routed.hidden) // length
    generator = torch.Generator().manual_seed(0)
    own = torch.repeat_interleave(torch.arange(len(experts)), torch.tensor(routed.counts)).to(bench.device)
    gradients = [torch.empty_like(w) for w in weights]
    for step in range(steps):
        chosen = torch.randperm(samples, generator=generator)[:_SAMPLES].to(bench.device)
        picked = torch.isin(torch.div(routed.token, length, rounding_mode="floor"), chosen)
        token, weight, expert = routed.token[picked], routed.weight[picked], own[picked]
        counts = torch.bincount(expert, minlength=len(experts)).tolist()
        parts = [experts[i : i + _TOGETHER] for i in range(0, len(experts), _TOGETHER)]
        current = Weights(*(rounder.current for rounder in rounders))
        total = torch.zeros(routed.hidden.shape, device=bench.device)
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        for part in parts:
            _, output, rows, mask = _forward(routed, token, firsts, counts, part, current)
            route = weight[rows].unsqueeze(-1) * mask
            total.index_add_(0, token[rows].flatten(), (output.output.float() * route).flatten(0, 1))
        touched = torch.unique(token)
        slope = torch.zeros_like(routed.hidden)
        slope[touched] = (total[touched] - target[touched].float()).to(slope.dtype)
        del total
        for part in parts:
            x, output, rows, mask = _forward(routed, token, firsts, counts, part, current)
            route = (weight[rows].unsqueeze(-1) * mask).to(x.dtype)
            span = slice(part[0], part[-1] + 1)
            found = moe.gradients(x, output, current.down[span], slope[token[rows]] * route)
            for kept, new in zip(gradients, found, strict=True):
                kept[span] = new
        for rounder, gradient in zip(rounders, gradients, strict=True):
            rounder.step(gradient, step)
    done = bench.sync()
    peak = bench.peak()
    torch.use_deterministic_algorithms(True, warn_only=True)
    got = torch.zeros_like(judged.hidden)
    for e in experts:
        gate_up, down = (grid.weights(*rounder.hard(e), judged.hidden.dtype) for rounder in rounders)
        add_expert(got, judged, e, gate_up, down)
    return {
        "seconds": done - begun,
        "tuning": done - begun,
        "steps": steps,
        "peak": peak,
        "error": bench.error(block, judged, got),
    }


def _forward(
    routed: Routed,
    token: torch.Tensor,
    firsts: list[int],
    counts: list[int],
    part: list[int],
    weights: Weights,
) -> tuple[torch.Tensor, moe.Pass, torch.Tensor, torch.Tensor]:
    """Inputs [E, M, H], the pass, rows int64 [E, M] into `token`, and mask [E, M, 1] of the rows that are real."""
    most = max(1, max(counts[e] for e in part))
    start = torch.tensor([firsts[e] for e in part], device=token.device).unsqueeze(1)
    count = torch.tensor([counts[e] for e in part], device=token.device).unsqueeze(1)
    place = torch.arange(most, device=token.device).unsqueeze(0)
    mask = (place < count).unsqueeze(-1)
    rows = (start + torch.minimum(place, (count - 1).clamp(min=0))).clamp(max=len(token) - 1)
    x = routed.hidden[token[rows]]
    span = slice(part[0], part[-1] + 1)
    return x, moe.forward(x, weights.gate_up[span], weights.down[span]), rows, mask
