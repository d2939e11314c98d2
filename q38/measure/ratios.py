"""Ratios of speeds with confidence intervals: trimmed t on the logarithms.

Speeds are positive and vary by factors, so the logarithm makes a ratio a difference of means (Fleming and Wallace, How not to lie with
statistics, 1986: ratios are averaged geometrically). A round that the machine interrupted is an outlier, and one among ten ruins a mean
and its t interval; so the fifth of the values at either end is trimmed (Yuen, Biometrika 61, 1974: the two-sample trimmed t for unequal
population variances; for pairs Tukey and McLaughlin, Sankhya A 25, 1963). Below five values nothing is trimmed and both are Welch's and
Student's t.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from q38.measure.stats import Interval

TRIM = 0.2
_LARGEST = math.log(sys.float_info.max)  # two rounds that differ wildly know no upper end
Logs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LogRatio:
    """An estimate of log(new / old): trimmed mean, its standard error, and degrees of freedom."""

    mean: float
    standard_error: float
    freedom: float

    def interval(self, confidence: float) -> Interval:
        """The ratio with a two-sided interval."""
        half = t_quantile((1 + confidence) / 2, self.freedom) * self.standard_error
        low, high = self.mean - half, min(self.mean + half, _LARGEST)
        return Interval(math.exp(self.mean), math.exp(low), math.exp(high), confidence)


def independent(new: Sequence[float], old: Sequence[float]) -> LogRatio:
    """Two separate runs, whose variances may differ (Yuen and Welch).

    Raises:
        ValueError: fewer than two values on a side, or one that is not positive.
    """
    (a, va, fa), (b, vb, fb) = _trimmed(_logs(new)), _trimmed(_logs(old))
    return LogRatio(a - b, math.sqrt(va + vb), _welch([(va, fa), (vb, fb)]))


def paired(new: Sequence[float], old: Sequence[float]) -> LogRatio:
    """Rounds that alternate between two servers: what both share, the machine's mood, cancels in each pair.

    Raises:
        ValueError: as `independent`, or the lengths differ.
    """
    if len(new) != len(old):
        raise ValueError(f"{len(new)} rounds beside {len(old)}")
    mean, variance, freedom = _trimmed(_logs(new) - _logs(old))
    return LogRatio(mean, math.sqrt(variance), freedom)


def pooled(parts: Sequence[LogRatio]) -> LogRatio:
    """Geometric mean of several ratios, each with the same weight."""
    n = len(parts)
    variances = [(p.standard_error**2 / n**2, p.freedom) for p in parts]
    return LogRatio(
        math.fsum(p.mean for p in parts) / n, math.sqrt(math.fsum(v for v, _ in variances)), _welch(variances)
    )


def t_quantile(p: float, freedom: float) -> float:
    """The value below which Student's t lies with probability `p` in [0.5, 1).

    Bisection of the closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), and between
    those linear in their inverse.
    """
    below = max(int(freedom), 1)
    low, high = _whole_quantile(p, below), _whole_quantile(p, below + 1)
    share = (1 / below - 1 / max(freedom, below)) * below * (below + 1)
    return low + share * (high - low)


def _whole_quantile(p: float, n: int) -> float:
    low, high = 0.0, 1.0
    while _central(high, n) < 2 * p - 1:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _central(middle, n) < 2 * p - 1 else (low, middle)
    return (low + high) / 2


def _central(t: float, n: int) -> float:
    """P(|T| < t) with n degrees of freedom."""
    if n > 2000:  # the normal distribution, to four digits
        return math.erf(t / math.sqrt(2))
    angle = math.atan(t / math.sqrt(n))
    sine, square = math.sin(angle), math.cos(angle) ** 2
    term = total = 1.0
    for k in range(2 if n % 2 else 1, n - 2, 2):
        term *= k / (k + 1) * square
        total += term
    if n % 2 == 0:
        return sine * total
    return 2 / math.pi * (angle + (sine * math.cos(angle) * total if n > 1 else 0.0))


def _trimmed(x: Logs) -> tuple[float, float, float]:
    """Mean without the TRIM share at either end, the variance of that mean, and its degrees of freedom."""
    cut = int(TRIM * x.size)
    ordered = np.sort(x)
    kept = ordered[cut : x.size - cut]
    pulled_in = np.clip(ordered, kept[0], kept[-1])  # Winsorized: outliers count as the last value kept
    variance = (x.size - 1) * float(pulled_in.var(ddof=1)) / (kept.size * (kept.size - 1))
    return float(kept.mean()), variance, kept.size - 1


def _welch(variances: Sequence[tuple[float, float]]) -> float:
    """Welch and Satterthwaite's degrees of freedom of a sum of variances of means."""
    total = math.fsum(v for v, _ in variances)
    if total == 0:
        return min(f for _, f in variances)
    return total**2 / math.fsum(v**2 / f for v, f in variances)


def _logs(values: Sequence[float]) -> Logs:
    x = np.asarray(values, dtype=np.float64)
    if x.size < 2 or not (x > 0).all():
        raise ValueError("a ratio needs two positive values or more on each side")
    return np.log(x)
