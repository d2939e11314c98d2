"""A small block of experts with inputs as uneven as real ones, and what the tests do with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch

from q38.quantize.local import grid, moe
from q38.quantize.local.settings import Settings
from q38.quantize.local.tokens import Routed
from q38.quantize.local.tune import Quantized, Weights

HIDDEN, MIDDLE, EXPERTS, PER_TOKEN, GROUP = 128, 64, 4, 2, 32


def settings(**changes: object) -> Settings:
    values = {
        "method": "expert-local", "bits": 2, "group_size": GROUP, "steps": 40, "rows": 64, "min_tokens": 32,
        "most_tokens": 512, "damp": 0.1, "seed": 0,
    }  # fmt: skip
    return Settings(**{**values, **changes})  # type: ignore[arg-type]


@dataclass
class Block:
    weights: Weights
    routed: Routed  # to tune on
    judged: Routed  # others, to judge on

    def load(self, experts: list[int], device: torch.device) -> Weights:
        return Weights(self.weights.gate_up[experts].to(device), self.weights.down[experts].to(device))

    def error(self, results: list[Quantized]) -> float:
        """Squared route-weighted output error over the squared output, on the tokens kept apart."""
        missed = total = 0.0
        for e, result in enumerate(results):
            token, weight = self.judged.of_expert(e)
            x = self.judged.hidden[token]
            gate_up, down = (
                grid.weights(lv, s, x.dtype) for lv, s in zip(result.levels, result.scales, strict=True)
            )
            wanted = moe.activate(x @ self.weights.gate_up[e].T) @ self.weights.down[e].T
            got = moe.activate(x @ gate_up.T) @ down.T
            route = weight.unsqueeze(-1)
            missed += float(((got - wanted) * route).square().sum())
            total += float((wanted * route).square().sum())
        return missed / total


def plain(weights: Weights, bits: int = 2) -> list[Quantized]:
    """Plain rounding of every expert."""
    results = []
    for gate_up, down in zip(*weights, strict=True):
        scales = [grid.storable(grid.plain_scales(w, bits, GROUP)) for w in (gate_up, down)]
        levels = [grid.nearest(w, s, bits) for w, s in zip((gate_up, down), scales, strict=True)]
        results.append(Quantized((levels[0], levels[1]), (scales[0], scales[1])))
    return results


@pytest.fixture(scope="session")
def make_block() -> Callable[..., Block]:
    def make(tokens: int = 512, seed: int = 0) -> Block:
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        mixing = draw(HIDDEN, HIDDEN) * torch.arange(1, HIDDEN + 1).pow(-0.7).unsqueeze(1)
        router = draw(HIDDEN, EXPERTS) / HIDDEN

        def routed(count: int) -> Routed:
            hidden = draw(count, HIDDEN) @ mixing
            weight, chosen = torch.softmax(hidden @ router, -1).topk(PER_TOKEN)
            return Routed.of(hidden, chosen, weight / weight.sum(-1, keepdim=True), EXPERTS)

        weights = Weights(0.1 * draw(EXPERTS, 2 * MIDDLE, HIDDEN), 0.1 * draw(EXPERTS, HIDDEN, MIDDLE))
        return Block(weights, routed(tokens), routed(tokens))

    return make


@pytest.fixture(scope="session")
def block(make_block: Callable[..., Block]) -> Block:
    return make_block()
