"""Differences between two sets of scores, and whether they keep the limits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from q38.measure.checks import finite
from q38.measure.oracle_limits import Limits
from q38.measure.oracle_prompts import Item, Prompt
from q38.measure.stats import Floats, clustered_mean

Scores = Sequence[Sequence[float]]


def compare_scores(before: Scores, now: Scores, limits: Limits) -> dict[str, Any]:
    """Mean and largest |difference| over all scored tokens, the change of the NLL, and whether they keep the limits.

    Args:
        before, now: natural-log probabilities, one list per prompt.

    Returns:
        {"passed", "mean", "mean_standard_error", "max", "nll", "nll_standard_error", ...}; nll is
        NLL now minus NLL before. A value that is not finite counts as an infinite difference.
    """
    difference = differences(before, now)
    flat = np.concatenate(difference)
    all_finite = bool(np.isfinite(flat).all())
    labels = np.repeat(np.arange(len(difference)), [len(d) for d in difference])
    held = {"mean": limits.mean, "max": limits.max, "nll": limits.nll}
    result: dict[str, Any] = {
        "passed": False,
        "mean": None,
        "mean_standard_error": None,
        "max": None,
        "nll": None,
        "nll_standard_error": None,
        "limits": held,
        "tokens": int(flat.size),
        "not_finite": int((~np.isfinite(flat)).sum()),
    }
    if not all_finite:
        return result
    mean = clustered_mean(flat, labels)
    signed = np.concatenate([np.asarray(a) - np.asarray(b) for a, b in zip(before, now, strict=True)])
    nll = clustered_mean(signed, labels)
    result |= {
        "mean": mean.value,
        "mean_standard_error": mean.standard_error,
        "max": float(flat.max()),
        "nll": nll.value,
        "nll_standard_error": nll.standard_error,
    }
    result["passed"] = all(limit is None or abs(float(result[name])) <= limit for name, limit in held.items())
    return result


def differences(before: Scores, now: Scores) -> list[Floats]:
    """|now - before| per prompt, in nats; infinite where one of the two is no number."""
    with np.errstate(invalid="ignore"):
        raw = [np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(before, now, strict=True)]
    return [np.where(np.isnan(d), math.inf, d) for d in raw]


def noise_of(runs: Sequence[Scores]) -> dict[str, Any]:
    """The spread of repeated runs: every later run against the first."""
    spreads = [np.concatenate(differences(runs[0], run)) for run in runs[1:]]
    nll = [-float(np.concatenate([np.asarray(s) for s in run]).mean()) for run in runs]
    return {
        "repeats": len(runs),
        "mean": float(np.mean([s.mean() for s in spreads])),
        "max": float(np.max([s.max() for s in spreads])),
        "nll": float(max(abs(value - nll[0]) for value in nll[1:])),
    }


def worst_token(items: Sequence[Item], before: Scores, now: Scores) -> dict[str, Any]:
    """The scored token with the largest difference: prompt, position, token_id, both values."""
    difference = differences(before, now)
    index = int(np.argmax([d.max() for d in difference]))
    position = int(np.argmax(difference[index]))
    return {
        "prompt": items[index].id,
        "position": position,
        "token_id": items[index].continuation[position],
        "reference": float(before[index][position]),
        "now": finite(float(now[index][position])),
    }


def by_prompt(prompts: Sequence[Prompt], before: Scores, now: Scores) -> list[dict[str, Any]]:
    """Mean and largest |difference| of each prompt."""
    return [
        {
            "id": prompt.id,
            "kind": prompt.kind,
            "language": prompt.language,
            "tokens": len(d),
            "mean": finite(float(d.mean())),
            "max": finite(float(d.max())),
        }
        for prompt, d in zip(prompts, differences(before, now), strict=True)
    ]
