"""Smoothing of merged profiles: what it must keep, and what it gains on tokens that nobody has seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.residency.imported import Sizes, import_files
from q38.residency.placement import coverage, heat, marginal_placement
from q38.residency.profile import Profile, load, load_halves, save
from q38.residency.smoothing import posterior, prior_of, smoothed_rates, strength
from q38.residency.synthetic import synthetic_trace
from q38.residency.trace import Trace, write_trace

LAYERS, EXPERTS, TOP_K = 3, 12, 3


def routed(seed: int, tokens: int, *, topic: int = 0) -> Profile:
    """Selections with a skew; `topic` says which experts are hot."""
    random = np.random.default_rng((seed, topic))
    popularity = np.random.default_rng(topic).permutation(np.linspace(1, 3, EXPERTS))
    noise = random.random((tokens, LAYERS, EXPERTS)) ** (1 / popularity)
    ids = noise.argsort(-1)[..., -TOP_K:]
    return Profile.of_trace(Trace(ids, None, EXPERTS))


several = st.lists(
    st.tuples(st.integers(0, 99), st.integers(1, 300), st.integers(0, 2)), min_size=1, max_size=3
)


@given(several, st.data())
@settings(max_examples=40)
def test_a_token_selects_top_k_experts_of_each_layer_before_and_after(
    parts: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    profiles = [routed(seed, tokens, topic=topic) for seed, tokens, topic in parts]
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(parts), max_size=len(parts)))
    rates = smoothed_rates(profiles, weights)
    assert (rates > 0).all() and np.allclose(rates.sum(1), TOP_K)


@given(st.integers(0, 99), st.integers(1, 300), st.integers(0, LAYERS * EXPERTS))
@settings(max_examples=40)
def test_a_profile_alone_keeps_its_order_in_and_across_layers(seed: int, tokens: int, slots: int) -> None:
    profile = routed(seed, tokens)
    smooth = Profile(profile.count, profile.mass, tokens, rate=smoothed_rates([profile]))
    assert np.array_equal(marginal_placement(smooth, slots), marginal_placement(profile, slots))


@given(st.integers(0, 99), st.integers(1, 300), st.floats(1, 1e6))
@settings(max_examples=40)
def test_every_share_lies_between_the_profiles_own_and_the_prior(seed: int, tokens: int, s: float) -> None:
    profile = routed(seed, tokens)
    prior = prior_of([routed(seed + 1, 200, topic=1)], profile.count.shape)
    own, rate = profile.count / tokens, posterior(profile, prior, s)
    low, high = np.minimum(own, prior * TOP_K), np.maximum(own, prior * TOP_K)
    assert (rate >= low - 1e-9).all() and (rate <= high + 1e-9).all()


@given(several, st.integers(0, 99))
@settings(max_examples=40)
def test_the_names_of_experts_do_not_matter(parts: list[tuple[int, int, int]], seed: int) -> None:
    profiles = [routed(s, tokens, topic=topic) for s, tokens, topic in parts]
    order = np.random.default_rng(seed).permutation(EXPERTS)
    renamed = [Profile(p.count[:, order], p.mass[:, order], p.tokens) for p in profiles]
    assert np.allclose(smoothed_rates(renamed), smoothed_rates(profiles)[:, order])


def test_workloads_that_route_alike_share_more_than_those_that_do_not() -> None:
    profile, shape = routed(1, 600), (LAYERS, EXPERTS)
    alike, other = (prior_of([routed(2, 5000, topic=topic)], shape) for topic in (0, 1))
    assert strength(profile, alike) > 20 * strength(profile, other)


def test_no_expert_is_ruled_out_by_the_other_profiles() -> None:
    silent = Profile(np.zeros((LAYERS, EXPERTS), np.int64), np.zeros((LAYERS, EXPERTS)), 1)
    assert np.allclose(prior_of([silent], silent.count.shape), 1 / EXPERTS)
    prior = prior_of([Profile(np.eye(LAYERS, EXPERTS, dtype=np.int64), silent.mass, 1)], silent.count.shape)
    assert prior.min() > 0 and np.allclose(prior.sum(1), 1)


def test_a_short_trace_gains_by_a_long_one_of_the_same_kind_and_loses_little_by_another() -> None:
    """512 tokens of one workload, 2,496 of another; S = 184 of 512, tested on tokens of the first."""
    sizes = {"layers": 3, "experts": 512, "top_k": 10}
    for shift, gain in ((0.0, 0.008), (0.5, -0.002)):
        seen, unseen = synthetic_trace(512 + 2000, **sizes, topic=1, shift=shift).split(512)
        other = Profile.of_trace(synthetic_trace(2496, **sizes, topic=0, seed=0))
        own, tested = Profile.of_trace(seen), Profile.of_trace(unseen)
        smooth = Profile(own.count, own.mass, own.tokens, rate=smoothed_rates([own, other], [1, 0]))
        before, after = (coverage(marginal_placement(p, 184 * 3), tested).selections for p in (own, smooth))
        assert after - before > gain


def test_a_smoothed_profile_reads_back_and_orders_experts_by_its_rates(tmp_path: Path) -> None:
    plain = routed(1, 600)
    rate = np.random.default_rng(0).random(plain.count.shape).astype(np.float32).astype(np.float64)
    smooth = Profile(plain.count, plain.mass, 600, rate=rate)
    save(smooth, tmp_path / "p", halves=(smooth, smooth))
    found, halves = load(tmp_path / "p"), load_halves(tmp_path / "p")
    assert found.rate is not None and np.array_equal(found.rate, rate)
    assert halves is not None and all(np.array_equal(half.rate, rate) for half in halves)
    assert np.array_equal(heat(found).argsort(axis=None), rate.argsort(axis=None))


@pytest.mark.parametrize("damage", ["dtype", "shape", "negative", "nan"])
def test_damaged_rates_are_refused(tmp_path: Path, damage: str) -> None:
    import torch

    from q38.checkpoint.writer import write_safetensors

    profile = routed(1, 600)
    rate = torch.ones(LAYERS, EXPERTS)
    match damage:
        case "dtype":
            rate = rate.double()
        case "shape":
            rate = rate[:, :-1].contiguous()
        case "negative":
            rate[0, 0] = -1
        case _:
            rate[0, 0] = float("nan")
    tensors = {
        "count": torch.from_numpy(profile.count),
        "mass": torch.from_numpy(profile.mass).float(),
        "rate": rate,
    }
    write_safetensors(tmp_path / "p", tensors, {"schema": "q38.routing-profile/1", "tokens": "600"})
    with pytest.raises(InputError, match="rate"):
        load(tmp_path / "p")


def test_files_are_smoothed_where_there_are_several(tmp_path: Path) -> None:
    files = []
    for seed, tokens in ((1, 600), (2, 3000)):
        noise = np.random.default_rng(seed).random((tokens, LAYERS, EXPERTS))
        files.append(tmp_path / f"{seed}.safetensors")
        write_trace(files[-1], Trace(noise.argsort(-1)[..., :TOP_K], None, EXPERTS))
    sizes = Sizes(LAYERS, EXPERTS, TOP_K)
    found = import_files(files, sizes, smoothing=True)
    plain = import_files(files, sizes)
    assert plain.whole.rate is None and np.array_equal(found.whole.count, plain.whole.count)
    assert found.whole.rate is not None and found.halves is not None
    assert all(half.rate is not None for half in found.halves)
    assert import_files(files[:1], sizes, smoothing=True).whole.rate is None
