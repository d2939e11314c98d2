"""One batch of experts: from source weights and routed tokens to levels and scales."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from q38.base.errors import InputError
from q38.quantize.local import grid, moe
from q38.quantize.local.gptq import Indefinite, gptq, hessian
from q38.quantize.local.gsq import Gsq
from q38.quantize.local.settings import EVALUATIONS, HELD_OUT, Settings
from q38.quantize.local.signround import SignRound
from q38.quantize.local.tokens import Routed, expert_seed, schedule, share

_GPTQ_AT_ONCE = 32  # experts: their Hessians and factors are 4 K^2 float32 each
_ROWS_AT_ONCE = 8192  # tokens of one expert in a product


class Weights(NamedTuple):
    """The matrices of a batch of experts in the compute dtype: gate_up [E, 2 I, H], down [E, H, I]."""

    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Quantized:
    """One expert's result.

    levels, scales: of gate_up, then of down: int8 [N, K] and float32 [N, G].
    before, after: squared route-weighted output error over the squared output, on held-out tokens, at the first
        step and at the best; None for an expert that was not tuned.
    best: the step that was kept.
    """

    levels: tuple[torch.Tensor, torch.Tensor]
    scales: tuple[torch.Tensor, torch.Tensor]
    before: float | None = None
    after: float | None = None
    best: int | None = None


class Rounder(Protocol):
    """A tuned rounding of one batch of matrices: see `SignRound` and `Gsq`."""

    current: torch.Tensor

    def step(self, gradient: torch.Tensor, done: int) -> None: ...

    def hard(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]: ...


def searched(weights: Weights, routed: Routed, experts: list[int], settings: Settings) -> list[Quantized]:
    """Optimal RTN: scales by search, each input weighted by its mean square over the expert's tokens.

    One more token counts: the mean over all tokens of the block, so that an expert no token reached has weights too.
    """
    typical = routed.hidden[:_ROWS_AT_ONCE].float().square().mean(0)  # [H]
    results = []
    for i, expert in enumerate(experts):
        token, weight = routed.of_expert(expert)
        token, weight = token[: settings.most_tokens], weight[: settings.most_tokens]
        x, route = routed.hidden[token], weight.square().unsqueeze(-1)
        active = moe.activate(x @ weights.gate_up[i].T)
        inputs = (typical + (x.float().square() * route).sum(0)) / (1 + len(token))
        inner = (active.float().square() * route).sum(0)
        inner = (inner + _typical(inner)) / (1 + len(token))
        pairs = []
        for matrix, importance in ((weights.gate_up[i], inputs), (weights.down[i], inner)):
            scale = grid.search(matrix, importance, settings.bits, settings.group_size)
            pairs.append((grid.nearest(matrix, scale, settings.bits), scale))
        results.append(_result(pairs))
    return results


def tuned(
    weights: Weights, routed: Routed, experts: list[int], block: int, settings: Settings
) -> list[Quantized]:
    """Tune a batch of experts together, each on its own tokens; see `q38.quantize.local.settings`.

    An expert's result does not depend on which others are in the batch, but for the order of summation inside
    a batched product.

    Args:
        experts: their numbers in the block; weights are in this order.
        block: index of the block; with the seed and the number it makes the expert's own seed.
    """
    data = _Data.make(weights, routed, experts, block, settings)
    rounders = _rounders(weights, data, settings)
    judge = _Judge(data, rounders)
    judge.look(0)
    every = max(1, settings.steps // EVALUATIONS)
    for done in range(settings.steps):
        step(data, rounders, done)
        if (done + 1) % every == 0 or done + 1 == settings.steps:
            judge.look(done + 1)
    return judge.results()


def step(data: _Data, rounders: list[Rounder], done: int) -> None:
    """One step of a batch: the gradient of the route-weighted squared output error on its rows of this step."""
    x, target, square = data.rows(done)
    forward = moe.forward(x, rounders[0].current, rounders[1].current)
    slope = ((forward.output.float() - target.float()) * square).to(x.dtype)
    found = moe.gradients(x, forward, rounders[1].current, slope)
    for rounder, gradient in zip(rounders, found, strict=True):
        rounder.step(gradient, done)


@dataclass(frozen=True)
class _Data:
    """The tokens of a batch of experts: flat lists, one expert after the other, and where the rows lie in them.

    token int64 [n], square float32 [n] (squared route weight), target [n, H]: what the source's expert makes of
    the token. train int32 [E, steps, rows], judged int32 [E, most held out] with square 0 where an expert has fewer.
    """

    hidden: torch.Tensor
    token: torch.Tensor
    square: torch.Tensor
    target: torch.Tensor
    train: torch.Tensor
    judged: torch.Tensor
    judged_square: torch.Tensor
    seeds: list[int]
    spans: list[tuple[int, int]]
    block: int
    experts: list[int]

    @classmethod
    def make(
        cls, weights: Weights, routed: Routed, experts: list[int], block: int, settings: Settings
    ) -> _Data:
        device = routed.hidden.device
        tokens, squares, targets, train, held, seeds, spans = [], [], [], [], [], [], []
        start = 0
        for i, expert in enumerate(experts):
            seeds.append(expert_seed(settings.seed, block, expert))
            generator = torch.Generator().manual_seed(seeds[-1])
            token, weight = routed.of_expert(expert)
            parts = share(len(token), limit=settings.most_tokens, held_out=HELD_OUT, generator=generator)
            kept = torch.cat([parts.train, parts.held_out])
            train.append(
                start + schedule(torch.arange(len(parts.train)), settings.steps, settings.rows, generator)
            )
            held.append(start + len(parts.train) + torch.arange(len(parts.held_out)))
            kept = kept.to(device)
            tokens.append(token[kept])
            squares.append(weight[kept].square())
            targets.append(_outputs(routed.hidden, tokens[-1], weights.gate_up[i], weights.down[i]))
            spans.append((start, start + len(parts.train)))
            start += len(kept)
        most = max(len(h) for h in held)
        judged = torch.stack([torch.cat([h, h[:1].expand(most - len(h))]) for h in held])
        real = torch.stack([torch.arange(most) < len(h) for h in held]).to(device)
        square, judged = torch.cat(squares), judged.to(device)
        return cls(
            routed.hidden, torch.cat(tokens), square, torch.cat(targets), torch.stack(train).int().to(device),
            judged, square[judged] * real, seeds, spans, block, experts,
        )  # fmt: skip

    def rows(self, step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Inputs and targets [E, rows, H] and squared route weights [E, rows, 1] of one step."""
        at = self.train[:, step].long()
        return self.hidden[self.token[at]], self.target[at], self.square[at].unsqueeze(-1)

    def trained_on(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs [n, H], route weights [n]) of all training tokens of the i-th expert."""
        span = slice(*self.spans[i])
        return self.hidden[self.token[span]], self.square[span].sqrt()


class _Judge:
    """Keeps each expert's best state by its error on the held-out tokens, of the weights as they would be stored."""

    def __init__(self, data: _Data, rounders: list[Rounder]) -> None:
        self._data, self._rounders = data, rounders
        self._levels = [
            torch.empty(r.current.shape, dtype=torch.int8, device=r.current.device) for r in rounders
        ]
        self._scales: list[dict[int, torch.Tensor]] = [{} for _ in rounders]
        energy = data.judged_square * data.target[data.judged].float().square().sum(-1)
        self._energy = energy.sum(1).clamp(min=torch.finfo(torch.float32).tiny)  # [E]
        self._first: dict[int, float] = {}
        self._least: dict[int, float] = {}
        self._best: dict[int, int] = {}

    def look(self, step: int) -> None:
        """Judge the state after `step` steps."""
        hidden = self._data.hidden
        for e, at in enumerate(self._data.judged):
            states = [rounder.hard(e) for rounder in self._rounders]
            gate_up, down = (grid.weights(levels, scale, hidden.dtype) for levels, scale in states)
            got = moe.activate(hidden[self._data.token[at]] @ gate_up.T) @ down.T
            gap = (got.float() - self._data.target[at].float()).square().sum(-1)
            error = float((self._data.judged_square[e] * gap).sum() / self._energy[e])
            if step == 0:
                self._first[e] = error
            if step == 0 or error < self._least[e]:
                self._least[e], self._best[e] = error, step
                for (levels, scale), kept, scales in zip(states, self._levels, self._scales, strict=True):
                    kept[e], scales[e] = levels, scale

    def results(self) -> list[Quantized]:
        return [
            Quantized(
                (self._levels[0][e], self._levels[1][e]),
                (self._scales[0][e], self._scales[1][e]),
                self._first[e],
                self._least[e],
                self._best[e],
            )
            for e in self._least
        ]


def _rounders(weights: Weights, data: _Data, settings: Settings) -> list[Rounder]:
    bits, steps = settings.bits, settings.steps
    scales = _start_scales(weights, data, settings)
    if settings.method == "expert-local":
        pairs = zip(weights, scales, strict=True)
        return [SignRound(w, s, bits=bits, steps=steps, rate=settings.rate) for w, s in pairs]
    levels = [torch.empty(w.shape, dtype=torch.int8, device=w.device) for w in weights]
    experts = range(len(data.seeds))
    for start in range(0, len(experts), _GPTQ_AT_ONCE):
        part = experts[start : start + _GPTQ_AT_ONCE]
        own = slice(part.start, part.stop)
        with _named(data, part):
            first = torch.stack([hessian(*data.trained_on(e)) for e in part])
            levels[0][own] = gptq(weights.gate_up[own], first, scales[0][own], bits=bits, damp=settings.damp)
            del first
            # The second matrix sees what the quantized first one makes of the tokens.
            second = torch.stack([_inner_hessian(data, e, levels[0][e], scales[0][e]) for e in part])
            levels[1][own] = gptq(weights.down[own], second, scales[1][own], bits=bits, damp=settings.damp)
    return [
        Gsq(lv, s, [seed ^ salt for seed in data.seeds], bits=bits, steps=steps, dtype=data.hidden.dtype)
        for salt, (lv, s) in enumerate(zip(levels, scales, strict=True))
    ]


@contextmanager
def _named(data: _Data, part: range) -> Iterator[None]:
    """A failure of GPTQ with the block and the expert.

    Raises:
        InputError: see `gptq`.
    """
    try:
        yield
    except Indefinite as error:
        i = part[error.which[0]]
        where = f"block {data.block}, expert {data.experts[i]}"
        if not bool(torch.isfinite(data.trained_on(i)[0]).all()):
            raise InputError(
                "its inputs hold a value that is infinite or not a number",
                where=where,
                remedy="run q38 inspect --deep on the source",
            ) from None
        raise InputError(
            "the Hessian of its inputs is singular for GPTQ",
            where=where,
            remedy="raise quantize.experts.damp and start over with --fresh",
        ) from None


def _inner_hessian(data: _Data, expert: int, levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    x, weight = data.trained_on(expert)
    return hessian(moe.activate(x @ grid.weights(levels, scale, x.dtype).T), weight)


def _start_scales(weights: Weights, data: _Data, settings: Settings) -> list[torch.Tensor]:
    """float32 [E, N, G] of gate_up and of down."""
    scales: list[list[torch.Tensor]] = [[], []]
    for e in range(len(data.seeds)):
        importance = _importance(data, e, weights.gate_up[e]) if settings.search else (None, None)
        for i, weight in enumerate(pair[e] for pair in weights):
            inputs = importance[i]
            if inputs is None:
                scale = grid.storable(grid.plain_scales(weight, settings.bits, settings.group_size))
            else:
                scale = grid.search(weight, inputs, settings.bits, settings.group_size)
            scales[i].append(scale)
    return [torch.stack(each) for each in scales]


def _importance(data: _Data, expert: int, gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean squares [H] and [I] of what the two matrices of an expert are given, route-weighted."""
    x, weight = data.trained_on(expert)
    inner = moe.activate(x @ gate_up.T)
    first, second = ((t.float() * weight.unsqueeze(-1)).square().mean(0) for t in (x, inner))
    return first, second


def _outputs(
    hidden: torch.Tensor, token: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """One expert's outputs [n, H], without the route weight."""
    parts = [moe.activate(hidden[t] @ gate_up.T) @ down.T for t in torch.split(token, _ROWS_AT_ONCE)]
    return torch.cat(parts) if parts else hidden.new_empty(0, hidden.shape[1])


def _typical(importance: torch.Tensor) -> torch.Tensor:
    """Their mean for every input; one where nothing was seen."""
    mean = importance.mean()
    return torch.where(mean > 0, mean, torch.ones_like(mean)).expand_as(importance)


def _result(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Quantized:
    (first, first_scale), (second, second_scale) = pairs
    return Quantized((first, second), (first_scale, second_scale))
