"""Which tokens each expert of a block gets, and which of them it is tuned and judged on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Routed:
    """The inputs of the experts of one block.

    hidden: [T, H] in the compute dtype.
    token: int64 [T * k], row of `hidden`, ordered by expert, then by token.
    weight: float32 [T * k], the router's weight, in the same order.
    first: int64 [E + 1], where each expert's tokens begin in the two.
    """

    hidden: torch.Tensor
    token: torch.Tensor
    weight: torch.Tensor
    first: torch.Tensor

    @classmethod
    def of(cls, hidden: torch.Tensor, chosen: torch.Tensor, weight: torch.Tensor, experts: int) -> Routed:
        """From what a router said: chosen experts int64 [T, k] and their weights [T, k]."""
        flat = chosen.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=experts)
        first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        token = torch.div(order, chosen.shape[1], rounding_mode="floor")
        return cls(hidden, token, weight.reshape(-1)[order].float(), first.cpu())

    @property
    def counts(self) -> list[int]:
        """Tokens routed to each expert."""
        return [int(n) for n in self.first.diff()]

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(token, weight) of all tokens of one expert."""
        span = slice(int(self.first[expert]), int(self.first[expert + 1]))
        return self.token[span], self.weight[span]

    def to(self, device: torch.device) -> Routed:
        return Routed(self.hidden.to(device), self.token.to(device), self.weight.to(device), self.first)


def coverage(counts: Sequence[int]) -> dict[str, Any]:
    """Tokens per expert, summed up."""
    return {"min": min(counts), "median": median(counts), "max": max(counts)}


def expert_seed(seed: int, block: int, expert: int) -> int:
    """A seed of its own for each expert, so that its result does not depend on which experts share its batch."""
    return int(np.random.SeedSequence([seed, block, expert]).generate_state(1)[0]) >> 1


@dataclass(frozen=True)
class Share:
    """The tokens one expert is tuned on, and those it is judged on. Both index its own list of tokens."""

    train: torch.Tensor
    held_out: torch.Tensor


def share(count: int, *, limit: int, held_out: float, generator: torch.Generator) -> Share:
    """Split `count` tokens (at most `limit` of them) at random; `held_out` is the share that is judged on."""
    order = torch.randperm(count, generator=generator)[:limit]
    judged = max(1, int(len(order) * held_out))
    return Share(order[judged:], order[:judged])


def schedule(train: torch.Tensor, steps: int, rows: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens of every step: int64 [steps, rows]. Every token is seen once before any is seen again."""
    wanted, orders = steps * rows, []
    while wanted > 0:
        orders.append(train[torch.randperm(len(train), generator=generator)][:wanted])
        wanted -= len(orders[-1])
    return torch.cat(orders).view(steps, rows) if orders else train.new_empty(0, rows)
