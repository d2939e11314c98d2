"""Smoothing of merged profiles: the counts of a short trace, drawn toward those of the other workloads.

    rate[l, e] = k (n[l, e] + s q[l, e]) / (N[l] + s)

the posterior mean under a Dirichlet prior with mean q and a weight of s selections; n are a profile's counts in layer
l, N their sum, k the experts of a token. q is the routing of the other profiles, even where there is none. An even
prior changes no order (N is the same in every layer), so a profile alone stays as it is.

The strength s is the one under which each selection of the profile is most probable given all its others: leave one
out, by which Zhai and Lafferty (2002) set the Dirichlet prior of language models. Workloads that route alike
give a large s and share their counts; others a small one. It errs toward the profile's own counts, since
neighbouring tokens choose alike and so make the profile look surer of itself than it is.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from q38.residency.profile import Profile, Rates, workload_shares

_GRID = 2.0 ** np.arange(0, 21)  # selections; at 2^20 the prior outweighs every trace
_FLOOR = 0.01  # share of the even distribution in a prior of counts, so that it rules no expert out


def smoothed_rates(profiles: Sequence[Profile], weights: Sequence[float] | None = None) -> Rates:
    """Selections per token of the merged workloads, float64 [L, E].

    Args:
        weights: share of each workload, default by its tokens. A workload of weight 0 only informs the others.

    Raises:
        InputError: as `profile.merge`.
    """
    shares = workload_shares(profiles, weights)
    total = np.zeros(profiles[0].count.shape)
    for i, (profile, share) in enumerate(zip(profiles, shares, strict=True)):
        prior = prior_of([*profiles[:i], *profiles[i + 1 :]], profile.count.shape)
        total += share * posterior(profile, prior, strength(profile, prior))
    return total


def prior_of(others: Sequence[Profile], shape: tuple[int, ...]) -> Rates:
    """Share of each expert in the selections of `others` together; even where there are none. [L, E]."""
    even = np.full(shape, 1 / shape[-1])
    count = sum((p.count for p in others), np.zeros(shape))
    total = count.sum(1, keepdims=True)
    found = np.divide(count, total, out=even.copy(), where=total > 0)
    return np.asarray((1 - _FLOOR) * found + _FLOOR * even)


def strength(profile: Profile, prior: Rates) -> float:
    """Selections that the prior is worth to each layer: of a grid, the one of the largest likelihood."""
    others = np.maximum(profile.count - 1, 0)  # of the same expert, beside a selection of it
    left = np.maximum(profile.count.sum(1, keepdims=True) - 1, 0)
    likelihood = [(profile.count * np.log((others + s * prior) / (left + s))).sum() for s in _GRID]
    return float(_GRID[np.argmax(likelihood)])


def posterior(profile: Profile, prior: Rates, s: float) -> Rates:
    """Selections per token [L, E] with a prior [L, E] of shares, worth s selections."""
    selections = profile.count.sum(1, keepdims=True)  # [L, 1]
    share = (profile.count + s * prior) / (selections + s)
    return np.asarray(share * selections / profile.tokens)
