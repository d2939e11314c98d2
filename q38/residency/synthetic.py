"""A synthetic routing trace with the skew and the overlap published for this model."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from q38.residency.trace import Trace

# Share of the gate mass that the hottest experts of a layer carry, as published for this model with
# 512 experts (REPORTED; 2,496 decoded tokens, three domains). Fractions of the number of experts.
PUBLISHED_SKEW = ((32 / 512, 0.37), (64 / 512, 0.53), (128 / 512, 0.73), (171 / 512, 0.82), (256 / 512, 0.93))
PUBLISHED_RECALL = 0.36  # share of a token's experts that the token before it used too (REPORTED)


def synthetic_trace(
    tokens: int,
    *,
    layers: int,
    experts: int,
    top_k: int,
    seed: int = 0,
    spread: float = 0.0,
    recall: float = PUBLISHED_RECALL,
    skew: tuple[tuple[float, float], ...] = PUBLISHED_SKEW,
    topic: int = 0,
    shift: float = 0.0,
) -> Trace:
    """A trace with a given skew and a given overlap of neighbouring tokens.

    Each expert keeps its slot from one token to the next with one probability, whichever expert it is,
    and is drawn anew from the skewed distribution otherwise; so the skew holds at any overlap.

    Args:
        spread: how much layers differ: layer l's popularity is raised to a power from 1 - spread to 1 + spread.
        recall: share of a token's experts that the token before it used too.
        skew: (fraction of experts, share of selections that the hottest such fraction carries), rising.
        topic: seed of another topic; with `shift`, which experts are hot differs between topics.
        shift: fraction of each layer's experts whose popularity is redrawn for the topic.
    """
    base = _popularity(experts, skew)
    rng = np.random.default_rng(seed)
    order = np.stack([rng.permutation(experts) for _ in range(layers)])  # which expert has which popularity
    topics = np.random.default_rng((topic, 977))
    for row in order if shift else ():
        moved = topics.choice(experts, int(shift * experts), replace=False)
        row[moved] = row[topics.permutation(moved)]
    powers = 1 + spread * rng.permutation(np.linspace(-1, 1, layers))  # [L]
    popularity = base ** powers[:, None]  # [L, E], hottest first
    inclusion = np.take_along_axis(_inclusion(popularity, top_k), order, axis=1)  # [L, E], by expert
    draws = np.random.default_rng((seed, topic, 1))
    keep = _keep_probability(recall, inclusion, top_k)
    fresh = _systematic(inclusion, 2 * tokens, top_k, draws)  # [2T, L, K]
    ids = np.empty((tokens, layers, top_k), np.int64)
    ids[0] = fresh[0]
    for t in range(1, tokens):
        stay = draws.random((layers, top_k)) < keep
        kept = np.where(stay, ids[t - 1], -1 - np.arange(top_k))  # distinct negatives: "none"
        ids[t] = _first_distinct(np.concatenate([kept, fresh[t], fresh[tokens + t]], axis=1), top_k)
    weights = draws.dirichlet(np.full(top_k, 8.0), (tokens, layers)).astype(np.float32)
    return Trace(ids, weights, experts)


def selection_rates(
    *,
    layers: int,
    experts: int,
    top_k: int,
    seed: int = 0,
    skew: tuple[tuple[float, float], ...] = PUBLISHED_SKEW,
) -> NDArray[np.float64]:
    """[layers, experts]: the share of tokens that choose each expert, with the popularity of a trace of that seed."""
    rng = np.random.default_rng(seed)
    order = np.stack([rng.permutation(experts) for _ in range(layers)])  # which expert has which popularity
    popularity = np.broadcast_to(_popularity(experts, skew), (layers, experts))
    return np.take_along_axis(_inclusion(popularity, top_k), order, axis=1)


def _popularity(experts: int, skew: tuple[tuple[float, float], ...]) -> NDArray[np.float64]:
    """Share of selections of each expert, hottest first: a concave curve through the given points."""
    x = np.array([0.0, *(p[0] for p in skew), 1.0])
    y = np.array([0.0, *(p[1] for p in skew), 1.0])
    # Monotone cubic (Fritsch-Carlson): slopes by harmonic means, which cannot overshoot.
    secant = np.diff(y) / np.diff(x)
    slope = np.empty_like(x)
    slope[1:-1] = 2 * secant[:-1] * secant[1:] / (secant[:-1] + secant[1:])
    slope[0], slope[-1] = 1.5 * secant[0] - 0.5 * slope[1], max(1.5 * secant[-1] - 0.5 * slope[-2], 0.0)
    grid = np.arange(experts + 1) / experts
    i = np.clip(np.searchsorted(x, grid, side="right") - 1, 0, len(secant) - 1)
    h = x[i + 1] - x[i]
    t = (grid - x[i]) / h
    curve = (
        y[i] * (1 + 2 * t) * (1 - t) ** 2
        + h * slope[i] * t * (1 - t) ** 2
        + y[i + 1] * t**2 * (3 - 2 * t)
        + h * slope[i + 1] * t**2 * (t - 1)
    )
    return np.sort(np.maximum(np.diff(curve), 1e-9))[::-1]


def _inclusion(popularity: NDArray[np.float64], top_k: int) -> NDArray[np.float64]:
    """Chance of each expert to be among a token's `top_k`: in proportion to popularity, none above one."""
    chance: NDArray[np.float64] = popularity * (top_k / popularity.sum(axis=1, keepdims=True))
    capped = chance >= 1
    while (chance > 1).any():
        chance[capped] = 1
        rest = np.where(capped, 0.0, chance)
        scale = (top_k - capped.sum(axis=1, keepdims=True)) / rest.sum(axis=1, keepdims=True)
        chance = np.where(capped, 1.0, rest * scale)
        capped |= chance >= 1
    return chance


def _keep_probability(recall: float, inclusion: NDArray[np.float64], top_k: int) -> float:
    """What keeping must add to chance.

    Two independent tokens overlap by chance = sum(p^2) / k. A slot drawn anew meets one of the experts that
    were not kept: recall = keep + (1 - keep)^2 chance, solved by iteration.
    """
    chance = float((inclusion**2).sum(axis=1).mean()) / top_k
    keep = recall
    for _ in range(20):
        keep = max(recall - (1 - keep) ** 2 * chance, 0.0)
    return keep


def _systematic(
    inclusion: NDArray[np.float64], tokens: int, top_k: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """[tokens, L, K] distinct experts, each drawn with exactly its probability (systematic sampling).

    Experts are laid end to end, each as long as its probability, and picked at k even steps from a
    random start; a new random order every few tokens keeps neighbours from being told apart for ever.
    """
    layers, experts = inclusion.shape
    out = np.empty((tokens, layers, top_k), np.int64)
    block = 32
    for begin in range(0, tokens, block):
        n = min(block, tokens - begin)
        for layer in range(layers):
            order = rng.permutation(experts)
            edges = np.cumsum(inclusion[layer, order])
            edges *= top_k / edges[-1]
            points = rng.random((n, 1)) + np.arange(top_k)  # [n, K]
            chosen = order[np.minimum(np.searchsorted(edges, points, side="right"), experts - 1)]
            out[begin : begin + n, layer] = rng.permuted(chosen, axis=1)
    return out


def _first_distinct(candidates: NDArray[np.int64], k: int) -> NDArray[np.int64]:
    """The first k different non-negative entries of each row of [L, n]."""
    n = candidates.shape[1]
    earlier = np.tril(np.ones((n, n), bool), -1)
    repeated = ((candidates[:, :, None] == candidates[:, None, :]) & earlier).any(axis=2)
    order = np.argsort(repeated | (candidates < 0), axis=1, kind="stable")[:, :k]
    return np.take_along_axis(candidates, order, axis=1)
