"""How often each row is expected to be read, from a profile and from what was counted since; and which rows to swap.

The simulator and the online adapter share both functions, so what one predicts the other does.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.residency.pool import Index
from q38.residency.store import Mask

Rates = NDArray[np.float64]


class HeatTracker:
    """Expected selections per token of every row: a profile, corrected by decayed counts.

        rate = (prior * prior_tokens + counts) / (prior_tokens + tokens)

    the posterior mean under a Gamma prior worth `prior_tokens` tokens; counts and tokens both halve
    every `half_life` tokens.

    Args:
        prior: [layers, experts], selections per token in the profile.
        prior_tokens: tokens of evidence that the profile is worth.
        half_life: tokens.
    """

    def __init__(self, prior: NDArray[np.floating[Any]], *, prior_tokens: float, half_life: float) -> None:
        self.prior = prior.astype(np.float64)
        self.prior_tokens, self.half_life = prior_tokens, half_life
        self.counts = np.zeros_like(self.prior)
        self.tokens = 0.0

    def add(self, counts: NDArray[Any], tokens: float) -> None:
        """Count the selections [layers, experts] of the last `tokens` tokens.

        They came one after the other, so the first ones have decayed by now: a token weighs the mean of 0.5^(t / half_life)
        over t from 0 to `tokens`. However long a prompt, it is worth half_life / ln 2 tokens at most.
        """
        if tokens <= 0:
            return
        halvings = tokens / self.half_life
        decay = 0.5**halvings
        weight = (1 - decay) / (halvings * math.log(2))
        self.counts = self.counts * decay + counts * weight
        self.tokens = self.tokens * decay + tokens * weight

    def rates(self) -> Rates:
        """[layers, experts]: expected selections per token."""
        return (self.prior * self.prior_tokens + self.counts) / (self.prior_tokens + self.tokens)


def choose_swaps(rates: Rates, on_device: Mask, limit: int, *, gain: float) -> tuple[Index, Index]:
    """The swaps that save most: hottest host rows against coldest device rows, in pairs.

    Args:
        rates: [rows], expected selections per token.
        on_device: bool [rows].
        limit: pairs at most.
        gain: selections per token that a pair must gain. A swap moves one row over the link, which it
            earns back in 1 / gain tokens.

    Returns:
        (promote, demote): row numbers, best pair first.
    """
    host, device = np.flatnonzero(~on_device), np.flatnonzero(on_device)
    limit = min(limit, len(host), len(device))
    if limit <= 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    promote = host[np.argpartition(-rates[host], limit - 1)[:limit]]
    demote = device[np.argpartition(rates[device], limit - 1)[:limit]]
    promote = promote[np.argsort(-rates[promote], kind="stable")]
    demote = demote[np.argsort(rates[demote], kind="stable")]
    worth = rates[promote] - rates[demote] > gain
    return promote[worth], demote[worth]


def hottest(rates: NDArray[Any], budgets: Index) -> Mask:
    """bool [layers, experts]: the `budgets[l]` hottest experts of each layer l."""
    order = np.argsort(-rates, axis=1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(rates.shape[1]), order.shape), axis=1)
    return rank < np.asarray(budgets)[:, None]


def hottest_overall(rates: NDArray[Any], total: int) -> Mask:
    """bool [layers, experts]: the `total` hottest rows of all layers; per layer, the budgets of equal marginal gain."""
    mask = np.zeros(rates.size, bool)
    mask[np.argsort(-rates, axis=None, kind="stable")[:total]] = True
    return mask.reshape(rates.shape)
