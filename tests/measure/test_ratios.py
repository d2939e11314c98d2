"""Ratios of speeds and their intervals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.measure.ratios import LogRatio, independent, paired, pooled, t_quantile

speeds = st.lists(st.floats(1, 1e3), min_size=2, max_size=12)


@pytest.mark.parametrize(
    ("p", "freedom", "expected"),
    [
        # Any table of Student's t.
        (0.975, 1, 12.7062),
        (0.975, 2, 4.30265),
        (0.975, 3, 3.18245),
        (0.975, 9, 2.26216),
        (0.995, 4, 4.60409),
        (0.9, 7, 1.41492),
        (0.9995, 10, 4.58689),
        (0.975, 120, 1.97993),
        (0.975, 1e9, 1.95996),
        (0.5, 5, 0.0),
    ],
)
def test_quantiles_are_those_of_the_tables(p: float, freedom: float, expected: float) -> None:
    assert t_quantile(p, freedom) == pytest.approx(expected, rel=2e-5, abs=1e-9)


@given(st.floats(0.5, 0.999), st.integers(1, 200))
def test_more_freedom_never_widens_an_interval(p: float, freedom: int) -> None:
    assert t_quantile(p, freedom + 1) <= t_quantile(p, freedom) + 1e-9


@given(speeds, speeds)
def test_the_ratio_swaps_to_its_inverse(a: list[float], b: list[float]) -> None:
    one, other = independent(a, b).interval(0.95), independent(b, a).interval(0.95)
    assert one.low <= one.value <= one.high
    assert (1 / other.high, 1 / other.value, 1 / other.low) == pytest.approx((one.low, one.value, one.high))


@given(speeds, speeds, st.floats(0.1, 10))
def test_a_faster_machine_moves_the_whole_interval(a: list[float], b: list[float], factor: float) -> None:
    plain, scaled = independent(a, b).interval(0.9), independent([factor * x for x in a], b).interval(0.9)
    assert (scaled.low, scaled.high) == pytest.approx((factor * plain.low, factor * plain.high))


@given(speeds, st.floats(0.5, 2))
def test_what_both_of_a_pair_share_cancels(mood: list[float], factor: float) -> None:
    interval = paired([factor * x for x in mood], mood).interval(0.99)
    assert (interval.low, interval.high) == pytest.approx((factor, factor))


@pytest.mark.parametrize("kind", [independent, paired])
def test_the_interval_covers_the_truth_about_as_often_as_it_claims(kind) -> None:
    random = np.random.default_rng(5)
    hits, trials = 0, 1000
    for _ in range(trials):
        new, old = np.exp(random.normal(math.log(0.95), 0.1, 5)), np.exp(random.normal(0, 0.03, 5))
        interval = kind(list(new), list(old)).interval(0.95)
        hits += interval.low < 0.95 < interval.high
    assert 0.93 < hits / trials < 0.98  # a normal quantile in place of t's would cover about 0.88


@given(
    st.lists(st.floats(1, 1e3), min_size=2, max_size=4), st.lists(st.floats(1, 1e3), min_size=2, max_size=4)
)
def test_below_five_values_it_is_the_ratio_of_geometric_means(a: list[float], b: list[float]) -> None:
    assert independent(a, b).mean == pytest.approx(np.log(a).mean() - np.log(b).mean(), abs=1e-9)


def test_the_trimmed_t_is_that_of_yuen() -> None:
    # 1 to 10, two cut at either end: mean of 3 to 8; Winsorized 3 3 3 4 5 6 7 8 8 8, squares around 5.5 sum to 42.5.
    estimate = paired([math.exp(x / 100) for x in range(1, 11)], [1.0] * 10)
    assert estimate.mean == pytest.approx(0.055)
    assert estimate.standard_error == pytest.approx(math.sqrt(42.5 / (6 * 5)) / 100)
    assert estimate.freedom == 5


@pytest.mark.parametrize("kind", [independent, paired])
def test_two_interrupted_rounds_in_ten_do_not_hide_five_percent(kind) -> None:
    random = np.random.default_rng(1)
    new, old = np.exp(random.normal(math.log(0.95), 0.005, 10)), np.exp(random.normal(0, 0.005, 10))
    new[3], new[7] = 0.3, 4.0
    interval = kind(list(new), list(old)).interval(0.99)
    assert 0.93 < interval.low < interval.high < 0.98


def test_welch_does_not_trust_the_noisier_side_more_than_its_own_freedom() -> None:
    noisy, quiet = [100.0, 130.0, 80.0], [100.0, 100.1, 99.9, 100.0, 100.1, 99.9]
    assert independent(noisy, quiet).freedom == pytest.approx(2, abs=0.01)


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(-1, 1), st.floats(0.001, 1), st.integers(1, 30)), min_size=1, max_size=6))
def test_pooling_is_a_geometric_mean_with_a_smaller_error(rows: list[tuple[float, float, int]]) -> None:
    parts = [LogRatio(*row) for row in rows]
    together = pooled(parts)
    assert together.mean == pytest.approx(np.mean([p.mean for p in parts]))
    assert together.standard_error <= max(p.standard_error for p in parts) + 1e-12
    assert together.freedom >= min(p.freedom for p in parts) - 1e-9


@pytest.mark.parametrize(("a", "b"), [([1.0], [1.0, 2.0]), ([], []), ([1.0, 0.0], [1.0, 2.0])])
def test_values_without_a_spread_are_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match="two positive values"):
        independent(a, b)


def test_pairs_need_partners() -> None:
    with pytest.raises(ValueError, match="3 rounds beside 2"):
        paired([1.0, 2.0, 3.0], [1.0, 2.0])


@pytest.mark.parametrize("error", [5.4, 1e6])
def test_two_rounds_that_differ_wildly_have_a_wide_interval_and_no_overflow(error: float) -> None:
    interval = LogRatio(-0.02, error, 1).interval(0.997)
    assert interval.low < 1e-300
    assert 1e300 < interval.high < np.inf
