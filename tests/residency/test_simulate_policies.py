"""Traces, heat and the policy simulator."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from q38.base.errors import InputError
from q38.checkpoint.writer import stream_safetensors
from q38.cli.app import app, register_verbs
from q38.residency.heat import HeatTracker, choose_swaps, hottest, hottest_overall
from q38.residency.simulate import (
    POLICIES,
    Outcome,
    Settings,
    read_model_trace,
    simulate,
    simulate_and_plot,
)
from q38.residency.synthetic import PUBLISHED_RECALL, PUBLISHED_SKEW, synthetic_trace
from q38.residency.trace import Trace, read_trace, write_trace
from q38.synth.config import tiny_config

ROW = 1000


@pytest.fixture(scope="module")
def published() -> Trace:
    """A trace with the published skew and overlap, long enough to rank its rows."""
    return synthetic_trace(3000, layers=6, experts=512, top_k=10, seed=3)


def test_the_synthetic_trace_has_the_published_skew(published: Trace) -> None:
    share = np.sort(published.counts(), axis=1)[:, ::-1].cumsum(axis=1) / (published.tokens * 10)
    for fraction, mass in (*PUBLISHED_SKEW, (184 / 512, 0.843)):
        assert share[:, round(fraction * 512) - 1].mean() == pytest.approx(mass, abs=0.01), fraction


def test_the_synthetic_trace_has_the_published_overlap_of_neighbouring_tokens(published: Trace) -> None:
    same = (published.ids[1:, :, :, None] == published.ids[:-1, :, None, :]).any(axis=3).mean()
    assert same == pytest.approx(PUBLISHED_RECALL, abs=0.01)


@given(experts=st.integers(8, 40), top_k=st.integers(1, 7), recall=st.floats(0, 0.9), seed=st.integers(0, 9))
def test_a_token_never_names_an_expert_twice_even_where_few_are_hot(
    experts: int, top_k: int, recall: float, seed: int
) -> None:
    trace = synthetic_trace(40, layers=2, experts=experts, top_k=top_k, recall=recall, seed=seed)
    ordered = np.sort(trace.ids, axis=2)
    assert (np.diff(ordered, axis=2) > 0).all()
    assert ordered.min() >= 0 and ordered.max() < experts


def test_a_shifted_topic_has_the_same_skew_and_other_hot_experts() -> None:
    a, b = (synthetic_trace(2000, layers=3, experts=64, top_k=4, topic=t, shift=0.5) for t in (0, 1))
    assert np.sort(a.counts(), axis=1)[:, -16:].sum() == pytest.approx(
        np.sort(b.counts(), axis=1)[:, -16:].sum(), rel=0.05
    )
    hot = hottest(a.counts(), np.full(3, 16))
    assert b.counts()[hot].sum() < 0.8 * a.counts()[hot].sum()


@given(st.integers(2, 12), st.booleans())
def test_a_trace_comes_back_from_its_file(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, weights: bool
) -> None:
    trace = synthetic_trace(tokens, layers=2, experts=300, top_k=3, seed=tokens)
    file = tmp_path_factory.mktemp("trace") / "trace.safetensors"
    write_trace(file, trace if weights else Trace(trace.ids, None, 300))
    again = read_trace(file)
    assert (again.ids == trace.ids).all() and again.experts == 300
    assert again.weights is None if not weights else (again.weights == trace.weights).all()


@pytest.mark.parametrize(
    ("dtype", "array", "metadata", "message"),
    [
        (
            "I16",
            np.full((4, 2, 3), 9, np.int16),
            {"experts": "9"},
            "ids run from 9 to 9, there are 9 experts",
        ),
        ("I16", np.full((4, 2, 3), -1, np.int16), {"experts": "9"}, "ids run from -1"),
        ("I16", np.zeros((4, 6), np.int16), {"experts": "9"}, "not integers [tokens, layers, top_k]"),
        ("F32", np.zeros((4, 2, 3), np.float32), {"experts": "9"}, "'ids' is F32 [4, 2, 3]"),
        ("I16", np.zeros((4, 2, 3), np.int16), {}, "no 'experts' in its metadata"),
    ],
)
def test_files_that_are_no_trace_are_refused(
    tmp_path: Path, dtype: str, array: np.ndarray, metadata: dict[str, str], message: str
) -> None:
    file = tmp_path / "trace.safetensors"
    stream_safetensors(
        file, [("ids", dtype, array.shape, array.nbytes)], [array.tobytes()], {"a": "b", **metadata}
    )
    with pytest.raises(InputError) as error:
        read_trace(file)
    assert message in str(error.value)


def outcomes(trace: Trace, resident: int, **options: float) -> dict[str, Outcome]:
    return {o.policy: o for o in simulate(trace, Settings(resident, ROW, **options))}


def reference_lru(trace: Trace, profile: np.ndarray, size: int) -> int:
    """Misses of one ordinary LRU list per layer, warmed with the profile's ranking."""
    misses = 0
    for layer in range(trace.layers):
        cache = list(np.argsort(profile[layer], kind="stable")[-size:])  # coldest first
        for ids in trace.ids[:, layer].tolist():
            misses += sum(e not in cache for e in ids)
            for e in ids:
                if e in cache:
                    cache.remove(e)
                cache.append(e)
            cache = cache[-size:]
    return misses


@given(seed=st.integers(0, 30), size=st.integers(3, 15))
def test_lru_agrees_with_a_plain_list(seed: int, size: int) -> None:
    trace = synthetic_trace(60, layers=2, experts=16, top_k=3, seed=seed, skew=((0.25, 0.6),))
    profile, rest = trace.split(30)
    lru = simulate(trace, Settings(size, ROW), policies=["lru"])[0]
    assert round((1 - lru.hit_rate) * rest.ids.size) == reference_lru(rest, profile.counts(), size)


def reference_lfu(trace: Trace, profile: np.ndarray, size: int, half_life: float) -> int:
    """Misses of plain decayed counters, one expert at a time; the higher number wins among equals."""
    misses = 0
    for layer in range(trace.layers):
        score = dict(enumerate((profile[layer] * half_life / np.log(2)).tolist()))
        resident = set(np.argsort(-profile[layer], kind="stable")[:size].tolist())
        for ids in trace.ids[:, layer].tolist():
            misses += sum(e not in resident for e in ids)
            score = {e: s * 2 ** (-1 / half_life) + (e in ids) for e, s in score.items()}
            resident = set(sorted(resident | set(ids), key=lambda e: (round(score[e], 7), e))[-size:])
    return misses


@given(seed=st.integers(0, 30), size=st.integers(3, 15), half_life=st.sampled_from([3.0, 20.0, 500.0]))
def test_lfu_agrees_with_plain_counters(seed: int, size: int, half_life: float) -> None:
    trace = synthetic_trace(60, layers=2, experts=16, top_k=3, seed=seed, skew=((0.25, 0.6),))
    profile, rest = trace.split(30)
    lfu = simulate(trace, Settings(size, ROW, half_life=half_life), policies=["lfu"])[0]
    assert round((1 - lfu.hit_rate) * rest.ids.size) == reference_lfu(
        rest, profile.counts() / 30, size, half_life
    )


def test_with_every_expert_resident_nothing_is_read_over_the_link(published: Trace) -> None:
    for outcome in outcomes(published.split(200)[0], 512).values():
        assert outcome.hit_rate == 1 and outcome.host_bytes_per_token == 0
        assert outcome.ms_per_token == pytest.approx(6 * 10 * ROW / 500e9 * 1e3)


def test_static_hits_and_bytes_are_those_of_the_profile_on_the_rest() -> None:
    ids = np.array([[[0, 1]], [[0, 2]], [[0, 3]], [[1, 2]]])  # the profile sees 0, 1, 2
    weights = np.array([[[0.5, 0.5]], [[0.5, 0.5]], [[0.9, 0.1]], [[0.4, 0.6]]], np.float32)
    trace = Trace(ids, weights, 4)
    static = simulate(trace, Settings(2, ROW, link_rate=1e6, device_rate=4e6), policies=["static count"])[0]
    # 0 and 1 resident (first of the equals): misses 3, and 2.
    assert static.hit_rate == 0.5 and static.mass_hit_rate == pytest.approx(1 - (0.1 + 0.6) / 2)
    assert static.host_bytes_per_token == ROW
    assert static.ms_per_token == pytest.approx(1.0)  # one row over the link hides one row in VRAM


def test_lru_pays_for_both_directions_and_reads_after_it_fetched() -> None:
    ids = np.array([[[0, 1]], [[0, 1]], [[2, 3]], [[0, 1]]])
    lru = simulate(Trace(ids, None, 4), Settings(2, ROW, link_rate=1e6, device_rate=4e6), policies=["lru"])[0]
    assert lru.hit_rate == 0 and lru.mass_hit_rate is None
    assert lru.host_bytes_per_token == lru.moved_bytes_per_token == 2 * ROW
    assert lru.ms_per_token == pytest.approx(2 * 1.0 + 2 * 0.25)


def test_with_free_reads_of_vram_the_time_is_that_of_the_bytes_over_the_link() -> None:
    a, b = (synthetic_trace(200, layers=4, experts=64, top_k=4, topic=t, shift=0.4) for t in (0, 1))
    trace = Trace(np.concatenate([a.ids, b.ids]), None, 64)
    for outcome in outcomes(trace, 20, link_rate=1e6, device_rate=1e30, half_life=100).values():
        assert outcome.ms_per_token == pytest.approx(outcome.host_bytes_per_token / 1e6 * 1e3)


def test_budgets_by_gain_beat_equal_budgets_where_layers_differ() -> None:
    trace = synthetic_trace(2000, layers=8, experts=64, top_k=4, spread=0.6)
    result = outcomes(trace, 20)
    assert result["static budgets"].hit_rate > result["static count"].hit_rate + 0.005


def test_swaps_recover_what_a_change_of_topic_costs() -> None:
    a, b = (synthetic_trace(2000, layers=4, experts=64, top_k=4, topic=t, shift=0.4) for t in (0, 1))
    trace = Trace(np.concatenate([a.ids, b.ids]), None, 64)
    result = outcomes(trace, 20, half_life=400, prior_tokens=200)
    assert result["prior + swaps"].hit_rate > result["static budgets"].hit_rate + 0.05
    assert 0 < result["prior + swaps"].moved_bytes_per_token <= 16 / 32 * ROW


@pytest.fixture
def tiny_config_file(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(layers=4)))
    return tmp_path / "config.json"


def test_a_trace_of_another_model_is_refused(tmp_path: Path, tiny_config_file: Path) -> None:
    file = tmp_path / "t.safetensors"
    write_trace(file, synthetic_trace(8, layers=2, experts=16, top_k=4))
    with pytest.raises(InputError, match="2 layers of 16 experts, the model has 4 of 16"):
        read_model_trace(file, tiny_config_file)


def test_a_trace_file_is_replayed_against_every_policy_and_plotted(
    tmp_path: Path, tiny_config_file: Path
) -> None:
    file, figure = tmp_path / "t.safetensors", tmp_path / "policies.svg"
    write_trace(file, synthetic_trace(40, layers=4, experts=16, top_k=4))
    trace = read_model_trace(file, tiny_config_file.parent)
    found = simulate_and_plot(trace, Settings(6, ROW), figure=figure)
    assert [o.policy for o in found] == list(POLICIES) and {o.resident for o in found} == {6}
    text = figure.read_text()
    assert "<svg" in text and len(text) > 5000


def test_residents_outside_the_possible_and_empty_traces_are_refused() -> None:
    trace = synthetic_trace(8, layers=1, experts=16, top_k=2)
    for resident in (1, 17):
        with pytest.raises(InputError, match="Give a number from 2 to 16"):
            simulate(trace, Settings(resident, ROW))
    with pytest.raises(InputError, match="a trace of 1 tokens"):
        simulate(trace.split(1)[0], Settings(4, ROW))


def test_heat_starts_at_the_profile_and_moves_to_what_is_counted() -> None:
    prior = np.array([[1.0, 0.0]])
    tracker = HeatTracker(prior, prior_tokens=100, half_life=100)
    assert (tracker.rates() == prior).all()
    for _ in range(200):
        tracker.add(np.array([[0, 10]]), 10)
    steady = 100 / np.log(2)  # tokens of evidence in the steady state
    assert tracker.rates()[0, 1] == pytest.approx(steady / (100 + steady), rel=1e-3)


@given(
    rates=st.lists(st.floats(0, 1), min_size=1, max_size=30),
    bits=st.integers(0, 2**30),
    limit=st.integers(0, 10),
    gain=st.floats(0, 0.5),
)
def test_swaps_are_the_best_pairs_and_each_gains_enough(
    rates: list[float], bits: int, limit: int, gain: float
) -> None:
    heat = np.array(rates)
    on_device = (bits >> np.arange(len(heat))) & 1 == 1
    promote, demote = choose_swaps(heat, on_device, limit, gain=gain)
    assert len(promote) == len(demote) <= limit
    assert not on_device[promote].any() and on_device[demote].all()
    assert (heat[promote] - heat[demote] > gain).all()
    pairs = list(zip(np.sort(heat[~on_device])[::-1], np.sort(heat[on_device]), strict=False))[:limit]
    assert len(promote) == sum(h - c > gain for h, c in pairs)
    assert heat[promote].tolist() == [h for h, c in pairs if h - c > gain]


@given(seed=st.integers(0, 99), total=st.integers(0, 24))
def test_the_hottest_overall_are_the_hottest_of_each_layer_at_some_budgets(seed: int, total: int) -> None:
    rates = np.random.default_rng(seed).random((3, 8))
    mask = hottest_overall(rates, total)
    assert mask.sum() == total
    assert (mask == hottest(rates, mask.sum(axis=1))).all()


def test_q38_plan_replays_a_trace_at_the_given_residents_and_link_rate(
    tmp_path: Path, tiny_config_file: Path
) -> None:
    file = tmp_path / "trace.safetensors"
    write_trace(file, synthetic_trace(16, layers=4, experts=16, top_k=4))
    register_verbs()
    times = {}
    for link in ("51GB", "25GB"):
        arguments = [
            "plan",
            str(tiny_config_file),
            "-r",
            "tiny",
            "--trace",
            str(file),
            "--resident",
            "8",
            "--link",
            link,
            "--json",
        ]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        replay = json.loads(result.stdout)["replay"]
        assert [o["policy"] for o in replay] == list(POLICIES) and {o["resident"] for o in replay} == {8}
        times[link] = replay[0]["ms_per_token"]
    assert times["25GB"] > times["51GB"]
