"""Standard errors of what q38 measures. Tokens of one sequence are correlated, so an error over tokens clusters by
sequence. Speeds: `q38.measure.ratios`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """A mean. `standard_error` is None where fewer than two clusters make it unknown."""

    value: float
    standard_error: float | None
    count: int
    clusters: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Interval:
    """A value with a two-sided confidence interval."""

    value: float
    low: float
    high: float
    confidence: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def clustered_mean(values: npt.ArrayLike, clusters: npt.ArrayLike) -> Estimate:
    """Mean of all values, with a standard error that allows any correlation inside a cluster.

    The mean is the ratio sum(values) / count, whose variance by linearization over G clusters with
    sums S_g and sizes n_g is G / (G - 1) * sum_g (S_g - mean * n_g)^2 / count^2
    (Cochran, Sampling Techniques, 3rd ed., section 9A; with clusters of one value it is the usual
    standard error s / sqrt(n)).

    Args:
        values: [n] floats.
        clusters: [n] labels, one per value (the sequence it came from).

    Raises:
        ValueError: no values, or the two lengths differ.
    """
    x = np.asarray(values, dtype=np.float64).ravel()
    labels = np.asarray(clusters).ravel()
    if x.size == 0 or x.size != labels.size:
        raise ValueError(f"{x.size} values for {labels.size} cluster labels")
    _, index = np.unique(labels, return_inverse=True)
    sizes = np.bincount(index).astype(np.float64)  # [G]
    mean = math.fsum(x) / x.size
    residuals = np.bincount(index, weights=x - mean)  # [G] S_g - mean * n_g
    groups = sizes.size
    error = None
    if groups > 1:
        error = math.sqrt(groups / (groups - 1) * math.fsum(residuals**2)) / x.size
    return Estimate(mean, error, x.size, groups)


def perplexity(nll: Estimate) -> Estimate:
    """exp(mean NLL); its standard error by the delta method is perplexity * error(NLL). NLL in nats."""
    value = math.exp(nll.value) if nll.value < 700 else math.inf  # exp overflows a double above 709
    error = None if nll.standard_error is None else value * nll.standard_error
    return Estimate(value, error, nll.count, nll.clusters)
