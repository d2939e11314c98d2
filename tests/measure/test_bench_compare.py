"""Two runs against each other: the verdicts, and what may not be compared."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.measure.bench.compare import (
    NOT_SLOWER,
    SLOWER,
    UNDECIDED,
    compare,
    differences,
    read_result,
    require_same,
)


def cell(factors: list[float], *, depth: int = 128, prefix: str = "cold", at_once: int = 1) -> dict[str, Any]:
    """A cell whose rounds take `factors` times as long as usual."""
    rounds = [
        {
            "first_token_s": 0.5 * f,
            "decode_tokens_per_s": 50 / f,
            "output_tokens_per_s": 40 / f,
            "requests": [{}] * at_once,
        }
        for f in factors
    ]
    return {"depth": depth, "concurrency": at_once, "prefix": prefix, "rounds": rounds}


def noisy(scale: float, seed: int, *, sigma: float = 0.005, n: int = 10) -> list[float]:
    return list(scale * np.exp(np.random.default_rng(seed).normal(0, sigma, n)))


RESULT: dict[str, Any] = {
    "schema": "q38.bench/2",
    "complete": True,
    "server": {"model": "m", "files": {"config.json": "aa"}},
    "text": {"sha256": "0" * 64},
    "settings": {
        "depths": [128],
        "concurrency": [1],
        "prefixes": ["cold"],
        "max_tokens": 64,
        "seed": 0,
        "ignore_eos": True,
    },
    "machine": {"runs_the_server": True, "cpu": "X", "cores": 2, "gpus": [{"name": "H200"}]},
}


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_five_percent_is_seen_and_an_equal_run_is_left_alone(seed: int) -> None:
    base = [cell(noisy(1, seed))]
    assert compare([cell(noisy(1.05, seed + 1))], base)["verdict"] == SLOWER
    assert compare([cell(noisy(1, seed + 1))], base)["verdict"] != SLOWER


def test_every_speed_of_every_cell_is_a_row_and_so_is_the_whole() -> None:
    new = [cell(noisy(1, 1)), cell(noisy(1, 2), depth=2048), cell(noisy(1, 3), at_once=4)]
    rows = compare(new, copy.deepcopy(new))["rows"]
    assert {(r["cell"], r["speed"]) for r in rows} >= {
        ("all cells", "decode"),
        ("depth 128, cold prefix", "first token"),
        ("depth 2,048, cold prefix", "decode"),
        ("depth 128, 4 at once, cold prefix", "all output"),
    }
    assert not any(r["speed"] == "all output" and "at once" not in r["cell"] for r in rows)
    assert all(r["ratio"] == pytest.approx(1) for r in rows)


def test_one_slow_cell_is_enough() -> None:
    new = [cell(noisy(1, 1)), cell(noisy(1.3, 2), depth=2048)]
    result = compare(new, [cell(noisy(1, 3)), cell(noisy(1, 4), depth=2048)], gate=0.9)
    slow = {r["cell"] for r in result["rows"] if r["verdict"] == SLOWER}
    assert result["verdict"] == SLOWER
    assert "depth 2,048, cold prefix" in slow
    assert "depth 128, cold prefix" not in slow


def test_more_rows_make_every_interval_wider_so_that_all_of_them_hold_together() -> None:
    def widths(depths: range) -> list[float]:
        new = [cell(noisy(1, d), depth=d) for d in depths]
        rows = compare(new, [cell(noisy(1, 9 + d), depth=d) for d in depths])["rows"]
        return [r["high"] - r["low"] for r in rows if r["cell"] == "depth 1, cold prefix"]

    assert all(alone < among for alone, among in zip(widths(range(1, 2)), widths(range(1, 7)), strict=True))


def test_noise_that_hides_the_gate_is_undecided_and_the_gate_moves_the_verdict() -> None:
    new, old = [cell(noisy(1, 1, sigma=0.1))], [cell(noisy(1, 2, sigma=0.1))]
    assert compare(new, old)["verdict"] == UNDECIDED
    assert compare(new, old, gate=0.5)["verdict"] == NOT_SLOWER
    assert compare(new, old, gate=1.5)["verdict"] == SLOWER


def test_a_loss_in_one_speed_is_told_from_the_others() -> None:
    base, stalling = cell(noisy(1, 1)), cell(noisy(1, 2))
    for played in stalling["rounds"]:
        played["decode_tokens_per_s"] *= 0.9
    rows = {r["speed"]: r["verdict"] for r in compare([stalling], [base])["rows"]}
    assert (rows["decode"], rows["first token"]) == (SLOWER, NOT_SLOWER)


def test_turns_cancel_a_drift_that_hides_a_slowdown_from_separate_runs() -> None:
    drift = np.exp(np.linspace(0, 0.5, 10))
    new, old = [cell(list(1.05 * drift))], [cell(list(drift * noisy(1, 3)))]
    assert compare(new, old)["verdict"] == UNDECIDED
    assert compare(new, old, in_pairs=True)["verdict"] == SLOWER


def test_a_cell_without_decode_speed_is_compared_by_the_rest() -> None:
    one = cell(noisy(1, 1))
    for played in one["rounds"]:
        played["decode_tokens_per_s"] = None
    assert [r["speed"] for r in compare([one], [cell(noisy(1, 2))])["rows"]] == ["first token"]


def test_nothing_in_common_and_single_rounds_are_refused() -> None:
    with pytest.raises(InputError, match="no cell in common"):
        compare([cell(noisy(1, 1))], [cell(noisy(1, 1), depth=64)])
    with pytest.raises(InputError, match="one round has no spread"):
        compare([cell([1.0])], [cell([1.0, 1.0])])


def other(**changes: Any) -> dict[str, Any]:
    changed = copy.deepcopy(RESULT)
    for path, value in changes.items():
        *parents, last = path.split("__")
        place = changed
        for name in parents:
            place = place[name]
        place[last] = value
    return changed


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"server__model": "n"}, "model: m, was n"),
        ({"server__files": {"config.json": "bb"}}, "model files differ"),
        ({"text__sha256": "1" * 64}, "text: 000000000000, was 111111111111"),
        ({"settings__max_tokens": 8}, "max_tokens: 64, was 8"),
        ({"settings__depths": [128, 2048]}, "depths: 128, was 128,2048"),
        ({"settings__ignore_eos": False}, "ignore_eos: True, was False"),
        ({"machine__gpus": []}, "gpus: H200, was none"),
        ({"machine__cpu": "Y"}, "cpu: X, was Y"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_different_measurements_are_refused_unless_told(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match="--allow-different") as refused:
        require_same(RESULT, other(**changes), where="--against", allow=False)
    assert words in str(refused.value)
    assert require_same(RESULT, other(**changes), where="--against", allow=True) == [words]


def test_the_same_measurement_has_no_differences_and_versions_are_none() -> None:
    assert differences(RESULT, other(q38="9.9", machine__load=3.0)) == []
    # A server elsewhere has no files to compare.
    assert differences(RESULT, other(server__files=None)) == []


def test_only_a_finished_result_can_be_compared_with(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    for text, words in (
        ("", "cannot be read"),
        ('{"schema": "q38.bench/1"}', "is not a result of this version"),
        (json.dumps({**RESULT, "complete": False}), "did not end"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            read_result(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_result(tmp_path / "none.json")
    file.write_text(json.dumps(RESULT))
    assert read_result(file) == RESULT
