"""Differences of scores, their noise, and the limits of each class of change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.measure.oracle_compare import compare_scores, noise_of
from q38.measure.oracle_limits import ABOVE_NOISE, PUBLISHED, Limits, limits_of

scores = st.lists(st.floats(-20, 0), min_size=1, max_size=9)


@given(st.lists(scores, min_size=1, max_size=4), st.floats(0, 2))
def test_a_constant_shift_is_its_own_mean_and_max(before: list[list[float]], shift: float) -> None:
    now = [[x - shift for x in row] for row in before]
    result = compare_scores(before, now, PUBLISHED["host"])
    assert result["mean"] == pytest.approx(shift, abs=1e-9)
    assert result["max"] == pytest.approx(shift, abs=1e-9)
    assert result["nll"] == pytest.approx(shift, abs=1e-9)
    assert result["passed"] == (shift <= 0.01) or shift == pytest.approx(0.01, abs=1e-9)


@given(st.lists(scores, min_size=1, max_size=4), st.data())
def test_one_large_difference_fails_whatever_the_mean(before: list[list[float]], data: st.DataObject) -> None:
    now = [list(row) for row in before]
    row = data.draw(st.integers(0, len(now) - 1))
    now[row][data.draw(st.integers(0, len(now[row]) - 1))] -= 0.6
    assert not compare_scores(before, now, Limits(max=0.5))["passed"]


def test_differences_that_cancel_change_no_nll() -> None:
    result = compare_scores([[-1.0, -2.0]], [[-1.5, -1.5]], PUBLISHED["approx"])
    assert (result["mean"], result["nll"], result["passed"]) == (0.5, 0.0, True)


def test_the_published_limits_are_the_defaults() -> None:
    for kind, limits in PUBLISHED.items():
        assert limits_of(kind, {"mean": 0.0, "max": 0.0, "nll": 0.0}) == limits
    assert (PUBLISHED["host"].mean, PUBLISHED["host"].max, PUBLISHED["kernel"].mean) == (0.01, 0.5, 0.05)
    assert PUBLISHED["kernel"].layer == 1e-3


@given(st.floats(0, 0.1), st.floats(0, 1))
def test_no_limit_is_below_the_noise(mean: float, largest: float) -> None:
    limits = limits_of("host", {"mean": mean, "max": largest, "nll": 0.0})
    assert limits.mean == max(0.01, ABOVE_NOISE * mean)
    assert limits.max == max(0.5, ABOVE_NOISE * largest)


def test_limits_by_hand_and_by_noise_replace_the_published_ones() -> None:
    noise = {"mean": 0.001, "max": 0.01, "nll": 0.0}
    assert limits_of("host", noise, times_noise=3) == Limits(mean=0.003, max=pytest.approx(0.03))
    assert limits_of("host", noise, max_mean=0.2, times_noise=3).mean == 0.2
    for wrong in ({"times_noise": 0}, {"max_mean": -1.0}, {"max_nll": 0.0}):
        with pytest.raises(InputError):
            limits_of("host", noise, **wrong)


def test_noise_of_equal_runs_is_nothing() -> None:
    assert noise_of([[[-1.0, -2.0]]] * 3) == {"repeats": 3, "mean": 0.0, "max": 0.0, "nll": 0.0}
