"""The metrics and their report, on runs made by hand."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.measure import forward
from q38.measure.forward import Run
from q38.measure.quality import compare, quality_part, read_part, with_limits

VOCABULARY, HIDDEN = 11, 6


def make_run(seed: int, *, sequences: int = 3, tokens: int = 7, noise: float = 0.0) -> Run:
    """A run whose hidden states are random, with the output head that all runs share."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sequences, tokens, HIDDEN, generator=generator)
    other = torch.randn(sequences, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(99))
    return Run(hidden + noise * other, lambda h: h @ weight.t())


def make_ids(sequences: int = 3, tokens: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(4))


def probabilities(run: Run) -> torch.Tensor:
    return run.head(run.hidden[:, :-1].reshape(-1, HIDDEN)).double().softmax(-1)


def test_a_run_agrees_with_itself() -> None:
    run = make_run(0)
    (same,) = compare(run, [run], make_ids())
    assert same.kl.max() == 0 and same.top1.min() == 1 and same.top5.min() == 1


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.01, 3))
def test_metrics_are_those_of_the_definitions(seed: int, noise: float) -> None:
    reference, run, ids = make_run(seed), make_run(seed, noise=noise), make_ids()
    p, q = probabilities(reference), probabilities(run)
    (found,) = compare(reference, [run], ids)
    target = ids[:, 1:].reshape(-1)
    index = torch.arange(len(target))
    assert np.allclose(found.kl, (p * (p.log() - q.log())).sum(-1).numpy(), atol=1e-9)
    assert np.allclose(found.nll, -q[index, target].log().numpy(), atol=1e-9)
    assert np.allclose(found.nll_reference, -p[index, target].log().numpy(), atol=1e-9)
    assert (found.kl >= -1e-12).all()
    expected = [
        len(set(a.topk(5).indices.tolist()) & set(b.topk(5).indices.tolist())) / 5
        for a, b in zip(p, q, strict=True)
    ]
    assert np.allclose(found.top5, expected)
    assert np.array_equal(found.top1, (p.argmax(-1) == q.argmax(-1)).double().numpy())


def test_the_result_does_not_depend_on_the_size_of_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    reference, run, ids = make_run(1), make_run(1, noise=0.5), make_ids()
    (whole,) = compare(reference, [run], ids)
    monkeypatch.setattr(forward, "LOGIT_BYTES", 8 * VOCABULARY * 4)  # four positions at a time
    (pieces,) = compare(reference, [run], ids)
    # A matrix product of other sizes may sum in another order.
    assert np.allclose(whole.kl, pieces.kl, atol=1e-5) and np.allclose(whole.nll, pieces.nll, atol=1e-5)


def test_errors_are_clustered_by_sequence() -> None:
    ids = make_ids(sequences=4, tokens=5)
    (found,) = compare(make_run(2, sequences=4, tokens=5), [make_run(3, sequences=4, tokens=5)], ids)
    assert found.sequence.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert found.mean(found.kl).clusters == 4


def test_several_runs_are_each_compared_with_the_reference() -> None:
    reference, ids = make_run(1), make_ids()
    runs = [make_run(1, noise=0.1), make_run(1, noise=0.5)]
    together = compare(reference, runs, ids)
    alone = [compare(reference, [run], ids)[0] for run in runs]
    assert all(np.array_equal(a.kl, b.kl) for a, b in zip(together, alone, strict=True))
    assert together[0].kl.mean() < together[1].kl.mean()


LABELS = np.array(["a"] * 9 + ["b"] * 9)


def part_of(noise: float, **limits: float) -> dict[str, Any]:
    reference, ids = make_run(6), make_ids()
    floor, ours = compare(reference, [make_run(6, noise=1e-3), make_run(6, noise=noise)], ids)
    part = quality_part(ours, floor, floor_kind="test", labels={"letter": LABELS})
    return with_limits(part, max_kl=limits.get("max_kl"), min_top1=limits.get("min_top1")).to_dict()


def check(part: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in part["checks"] if c["name"] == name)


def test_a_limit_stands_beside_its_value_and_decides() -> None:
    part = part_of(1.0, max_kl=1e-4, min_top1=0.01)
    kl, top1 = check(part, "kl divergence"), check(part, "top-1 agreement")
    assert not part["passed"]
    assert (kl["passed"], kl["limit"]) == (False, 1e-4) and kl["value"] > 1e-4 and kl["standard_error"] > 0
    assert (top1["passed"], top1["limit"]) == (True, 0.01)


def test_too_little_agreement_fails() -> None:
    assert not part_of(3.0, min_top1=0.999)["passed"]


def test_without_limits_a_finite_model_passes_and_the_floor_is_there() -> None:
    part = part_of(1.0)
    assert part["passed"]
    assert 0 < part["floor"]["kl divergence"]["value"] < check(part, "kl divergence")["value"]


def test_a_model_that_gives_nan_fails_and_the_document_stays_json() -> None:
    part = part_of(math.nan, max_kl=1.0)
    assert not part["passed"]
    assert check(part, "kl divergence")["note"] == "not finite"
    json.loads(json.dumps(part, allow_nan=False))


def test_labels_split_the_positions_and_their_means_make_up_the_whole() -> None:
    part = part_of(1.0)
    a, b = part["by"]["letter"]
    assert (a["name"], a["positions"], b["positions"]) == ("a", 9, 9)
    for name in ("kl divergence", "nll", "nll, source", "top-1 agreement", "top-5 agreement"):
        whole = check(part, name)["value"]
        assert (a[name]["value"] + b[name]["value"]) / 2 == pytest.approx(whole)
    assert a["kl divergence"]["value"] != b["kl divergence"]["value"]
    assert (
        a["kl divergence"]["clusters"] == a["sequences"] == 2
    )  # of nine positions the last three are of the second
    assert (a["floor"]["value"] + b["floor"]["value"]) / 2 == pytest.approx(
        part["floor"]["kl divergence"]["value"]
    )


def test_a_stored_report_is_judged_by_new_limits() -> None:
    stored = json.loads(json.dumps(part_of(1.0)))
    again = with_limits(read_part(stored), max_kl=1e-4, min_top1=None).to_dict()
    assert not again["passed"]
    assert {**again, "passed": True, "checks": []} == {**stored, "checks": []}
