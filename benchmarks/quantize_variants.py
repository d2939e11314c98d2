"""Variants of expert-local tuning that were tried beside it: what each changes, held inside a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from q38.quantize.adjustments import replaced
from q38.quantize.local import block as experts_of_a_block
from q38.quantize.local import grid, moe, tune
from q38.quantize.local.gptq import gptq, hessian
from q38.quantize.local.settings import Settings
from q38.quantize.local.signround import SignRound
from q38.quantize.local.store import Expert
from q38.quantize.local.tokens import Routed
from q38.quantize.rtn import round_to_nearest

_DAMP = 0.01  # of the solved scales: share of the mean diagonal that holds them where they were
_OUTLIERS = 1e-3  # share of the outputs that a step leaves out: what AutoRound's alg_ext does


@dataclass(frozen=True)
class Row:
    """One variant.

    method: of the recipe.
    steps: in units of what the benchmark is given.
    changes: of the settings.
    start: "search", or "gptq": each weight clipped to the cell of the level that GPTQ chose for it.
    solve: matrices whose scales are solved for by least squares after tuning: "", "down" or "both".
    order: which matrix a step moves: "both", "turns" (one, then the other), "first" (half of the steps each).
    outliers: leave the largest errors of each step out.
    worst: (share, factor): the experts with the largest error are tuned again with so many times the steps.
    wide: blocks whose experts get another width, and that width.
    """

    method: str = "expert-local"
    steps: float = 1
    changes: dict[str, Any] = field(default_factory=dict)
    start: str = "search"
    solve: str = ""
    order: str = "both"
    outliers: bool = False
    worst: tuple[float, float] | None = None
    wide: dict[int, int] = field(default_factory=dict)


ROWS: dict[str, Row] = {
    "rtn": Row("rtn"),
    "opt-rtn": Row("opt-rtn"),
    "expert-local": Row(),
    "plain scales": Row(changes={"search": False}),
    "plain scales, rate 1": Row(changes={"search": False, "rate": 1.0}),
    "rate 1": Row(changes={"rate": 1.0}),
    "rate 4": Row(changes={"rate": 4.0}),
    "2 x steps": Row(steps=2),
    "5 x steps": Row(steps=5),
    "from GPTQ": Row(start="gptq"),
    "GPTQ alone": Row(steps=0.01, start="gptq", changes={"rate": 0.0}),
    "scales solved": Row(solve="down"),
    "scales solved, both": Row(solve="both"),
    "outliers left out": Row(outliers=True),
    "worst quarter again, 4 x steps": Row(worst=(0.25, 4)),
    "turns": Row(order="turns"),
    "gate and up first": Row(order="first"),
    "groups of 64": Row(changes={"group_size": 64}),
    **{f"block {i} at 3 bits": Row(wide={i: 3}) for i in range(4)},
    "gsq": Row("expert-local-gsq", steps=2),
    "gsq, scales solved": Row("expert-local-gsq", steps=2, solve="down"),
}


@contextmanager
def varied(row: Row, steps: int) -> Iterator[None]:
    """Hold what a row changes beside settings, for runs of `steps` steps."""
    with ExitStack() as stack:
        if row.start == "gptq":
            stack.enter_context(replaced(tune, "_rounders", _from_gptq))
        if row.solve:
            stack.enter_context(replaced(experts_of_a_block, "tuned", _Solved(row.solve)))
        if row.order != "both":
            stack.enter_context(replaced(tune, "step", _Ordered(row.order, steps)))
        if row.outliers:
            stack.enter_context(replaced(tune, "step", _without_outliers))
        yield


def plain(weights: tune.Weights, settings: Settings) -> dict[int, Expert]:
    """Plain rounding of every expert."""

    def rounded(matrix: torch.Tensor) -> Any:
        return round_to_nearest(matrix.cpu(), settings.bits, settings.group_size)

    return {
        e: Expert(*map(rounded, gate_up.chunk(2)), rounded(down), None, None, None)
        for e, (gate_up, down) in enumerate(zip(*weights, strict=True))
    }


def solve_scales(
    levels: torch.Tensor, scale: torch.Tensor, x: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """The scales with the least squared output error for levels that stay: one linear system a row.

    With q the levels of a row by group and X_g the inputs of group g, the output of the row is the sum over g of
    s_g X_g q_g: linear in its scales s.

    Args:
        levels: int8 [N, K].
        scale: float32 [N, G], the scales to start from.
        x: [n, K] inputs, times the square root of each token's weight.
        target: [n, N] outputs wanted, times the same.
    """
    groups = scale.shape[-1]
    rows, wanted = x.float(), target.float()
    products = rows.T @ rows  # [K, K]
    aims = grid.grouped((rows.T @ wanted).T, groups)  # [N, G, g]
    by_group = grid.grouped(levels.float(), groups)  # [N, G, g]
    own = products.view(groups, -1, products.shape[-1])
    matrix = torch.stack(
        [(grid.grouped(by_group[:, g] @ own[g], groups) * by_group).sum(-1) for g in range(groups)], dim=1
    )  # [N, G, G]
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    hold = _DAMP * diagonal.mean(-1, keepdim=True) + 1e-20  # [N, 1]
    side = (by_group * aims).sum(-1) + hold * scale
    diagonal += hold
    return grid.storable(torch.linalg.solve(matrix, side))


class _Solved:
    """`tune.tuned`, and scales solved for on the training tokens where that is better on those kept apart."""

    def __init__(self, which: str) -> None:
        self._which, self._original = which, tune.tuned

    def __call__(
        self, weights: tune.Weights, routed: Routed, experts: list[int], block: int, settings: Settings
    ) -> list[tune.Quantized]:
        results = self._original(weights, routed, experts, block, settings)
        data = tune._Data.make(weights, routed, experts, block, settings)
        return [self._one(e, result, weights, data) for e, result in enumerate(results)]

    def _one(self, e: int, result: tune.Quantized, weights: tune.Weights, data: Any) -> tune.Quantized:
        x, route = data.trained_on(e)
        route = route.to(x.dtype).unsqueeze(-1)
        (gate_up, down), (first, second) = result.levels, result.scales
        if self._which == "both":
            first = solve_scales(gate_up, first, x * route, (x @ weights.gate_up[e].T) * route)
        inner = moe.activate(x @ grid.weights(gate_up, first, x.dtype).T)
        second = solve_scales(down, second, inner * route, data.target[slice(*data.spans[e])] * route)
        error = self._error(e, data, [(gate_up, first), (down, second)])
        if result.after is not None and error >= result.after:
            return result
        return replace(result, scales=(first, second), after=error)

    def _error(self, e: int, data: Any, states: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        at = data.judged[e]
        gate_up, down = (grid.weights(levels, scale, data.hidden.dtype) for levels, scale in states)
        wanted = data.target[at].float()
        got = (moe.activate(data.hidden[data.token[at]] @ gate_up.T) @ down.T).float()
        square = data.judged_square[e]
        return float(
            (square * (got - wanted).square().sum(-1)).sum() / (square * wanted.square().sum(-1)).sum()
        )


def _from_gptq(weights: tune.Weights, data: Any, settings: Settings) -> list[Any]:
    """SignRound whose first state is GPTQ's, with searched scales."""
    scales = tune._start_scales(weights, data, settings)
    starts = [torch.empty_like(w) for w in weights]
    for e in range(len(data.seeds)):
        x, route = data.trained_on(e)
        for i, weight in enumerate(pair[e] for pair in weights):
            scale = scales[i][e]
            levels = gptq(
                weight[None], hessian(x, route)[None], scale[None], bits=settings.bits, damp=settings.damp
            )
            centre = grid.grouped(levels[0].float(), scale.shape[-1]) * scale.unsqueeze(-1)
            room = 0.49 * scale.abs().unsqueeze(-1)
            cell = grid.grouped(weight.float(), scale.shape[-1]).clamp(centre - room, centre + room)
            starts[i][e] = cell.flatten(-2)
            x = moe.activate(x @ grid.weights(levels[0], scale, x.dtype).T) if i == 0 else x
    return [
        SignRound(w, s, bits=settings.bits, steps=settings.steps, rate=settings.rate)
        for w, s in zip(starts, scales, strict=True)
    ]


def _without_outliers(data: Any, rounders: list[Any], done: int) -> None:
    """`tune.step` without the largest errors of each expert."""
    x, target, square = data.rows(done)
    forward = moe.forward(x, rounders[0].current, rounders[1].current)
    gap = forward.output.float() - target.float()
    size = (gap * square.sqrt()).abs().flatten(1)  # [E, rows * H]
    most = size.topk(max(1, int(size.shape[1] * _OUTLIERS)), dim=1).values[:, -1]
    gap = torch.where(size.view_as(gap) < most[:, None, None], gap, 0)
    found = moe.gradients(x, forward, rounders[1].current, (gap * square).to(x.dtype))
    for rounder, gradient in zip(rounders, found, strict=True):
        rounder.step(gradient, done)


class _Ordered:
    """`tune.step` that moves one matrix at a time."""

    def __init__(self, order: str, steps: int) -> None:
        self._order, self._half, self._original = order, max(1, steps // 2), tune.step

    def __call__(self, data: Any, rounders: list[Any], done: int) -> None:
        if self._order == "turns":
            which, own = done % 2, done
        else:
            which, own = int(done >= self._half), 2 * (done % self._half)
        views = [_View(rounder, own if i == which else None) for i, rounder in enumerate(rounders)]
        self._original(data, views, done)


class _View:
    """A rounder whose schedule stands at another step, or (None) that stays where it is."""

    def __init__(self, rounder: Any, done: int | None) -> None:
        self.current, self._rounder, self._done = rounder.current, rounder, done

    def step(self, gradient: torch.Tensor, done: int) -> None:
        del done
        if self._done is not None:
            self._rounder.step(gradient, self._done)
