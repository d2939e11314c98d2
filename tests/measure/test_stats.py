from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.measure.stats import Estimate, clustered_mean, perplexity

finite = st.floats(-1e6, 1e6, allow_nan=False)


@given(st.lists(finite, min_size=2, max_size=50))
def test_clusters_of_one_value_give_the_textbook_standard_error(values: list[float]) -> None:
    estimate = clustered_mean(values, range(len(values)))
    assert estimate.value == pytest.approx(np.mean(values), abs=1e-6)
    assert estimate.standard_error == pytest.approx(np.std(values, ddof=1) / math.sqrt(len(values)), abs=1e-6)


@given(st.lists(finite, min_size=2, max_size=20), st.integers(2, 9))
def test_repeating_a_value_inside_its_cluster_adds_no_information(values: list[float], copies: int) -> None:
    once = clustered_mean(values, range(len(values)))
    repeated = clustered_mean(np.repeat(values, copies), np.repeat(range(len(values)), copies))
    assert repeated.value == pytest.approx(once.value, abs=1e-6)
    assert repeated.standard_error == pytest.approx(once.standard_error, abs=1e-6)


@given(st.lists(st.tuples(finite, st.integers(0, 5)), min_size=1, max_size=40), st.randoms())
def test_order_of_the_tokens_does_not_matter(rows: list[tuple[float, int]], random) -> None:
    shuffled = list(rows)
    random.shuffle(shuffled)
    first = clustered_mean(*zip(*rows, strict=True))
    second = clustered_mean(*zip(*shuffled, strict=True))
    assert first.value == pytest.approx(second.value, abs=1e-6)
    assert first.standard_error == pytest.approx(second.standard_error, abs=1e-6, nan_ok=True) or (
        first.standard_error is None and second.standard_error is None
    )


def test_one_cluster_has_no_standard_error() -> None:
    assert clustered_mean([1.0, 2.0, 3.0], [7, 7, 7]).standard_error is None


def test_the_error_covers_the_truth_about_as_often_as_it_claims() -> None:
    random = np.random.default_rng(5)
    hits, trials = 0, 400
    labels = np.repeat(np.arange(40), 25)
    for _ in range(trials):
        shared = random.normal(size=40)  # what the tokens of one sequence have in common
        values = np.repeat(shared, 25) + random.normal(size=1000)
        estimate = clustered_mean(values, labels)
        assert estimate.standard_error is not None
        hits += abs(estimate.value) < 1.96 * estimate.standard_error
    assert 0.90 < hits / trials < 0.98  # an error that ignored the clusters would cover about 0.5


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 cluster labels"):
        clustered_mean([1, 2], [0, 1, 2])


@given(st.floats(0, 20), st.floats(0, 1))
def test_perplexity_error_follows_the_delta_method(nll: float, error: float) -> None:
    result = perplexity(Estimate(nll, error, 10, 5))
    slope = (math.exp(nll + 1e-6) - math.exp(nll - 1e-6)) / 2e-6
    assert result.value == pytest.approx(math.exp(nll))
    assert result.standard_error == pytest.approx(slope * error, rel=1e-6, abs=1e-9)


def test_perplexity_of_a_broken_model_is_infinite_and_does_not_raise() -> None:
    assert perplexity(Estimate(1e4, None, 10, 5)).value == math.inf
