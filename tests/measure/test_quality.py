from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.checkpoint.index import Checkpoint
from q38.measure import forward
from q38.measure.forward import Run, other_experts, run_model
from q38.measure.quality import compare, layer_errors, quality_part
from q38.measure.verify import measure_quality
from tests.measure.packed import copy_model, edit_tensor

VOCABULARY, HIDDEN = 11, 6


def make_run(seed: int, *, sequences: int = 3, tokens: int = 7, noise: float = 0.0) -> Run:
    """A run whose hidden states are random, with the output head that all runs share."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(sequences, tokens, HIDDEN, generator=generator)
    other = torch.randn(sequences, tokens, HIDDEN, generator=torch.Generator().manual_seed(seed + 1))
    weight = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(99))
    blocks = torch.randn(2, sequences, tokens, HIDDEN, generator=generator)
    return Run(hidden + noise * other, lambda h: h @ weight.t(), blocks)


def make_ids(sequences: int = 3, tokens: int = 7) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (sequences, tokens), generator=torch.Generator().manual_seed(4))


def probabilities(run: Run) -> torch.Tensor:
    return run.head(run.hidden[:, :-1].reshape(-1, HIDDEN)).double().softmax(-1)


def test_a_run_agrees_with_itself() -> None:
    run = make_run(0)
    same = compare(run, run, make_ids())
    assert same.kl.max() == 0 and same.top1.min() == 1 and same.top5.min() == 1
    assert same.layers == [0.0, 0.0]


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.01, 3))
def test_metrics_are_those_of_the_definitions(seed: int, noise: float) -> None:
    reference, run, ids = make_run(seed), make_run(seed, noise=noise), make_ids()
    p, q = probabilities(reference), probabilities(run)
    found = compare(reference, run, ids)
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
    whole = compare(reference, run, ids)
    monkeypatch.setattr(forward, "LOGIT_BYTES", 8 * VOCABULARY * 4)  # four positions at a time
    pieces = compare(reference, run, ids)
    assert np.array_equal(whole.kl, pieces.kl) and np.array_equal(whole.nll, pieces.nll)


def test_errors_are_clustered_by_sequence() -> None:
    ids = make_ids(sequences=4, tokens=5)
    found = compare(make_run(2, sequences=4, tokens=5), make_run(3, sequences=4, tokens=5), ids)
    assert found.sequence.tolist() == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4
    assert found.mean(found.kl).clusters == 4


def test_a_scaled_block_has_the_error_of_its_scale() -> None:
    reference = make_run(5)
    scaled = Run(
        reference.hidden, reference.head, reference.blocks * torch.tensor([1.0, 1.25])[:, None, None, None]
    )
    assert layer_errors(reference, scaled) == pytest.approx([0, 0.25])


def part_of(noise: float, **limits: float) -> dict[str, Any]:
    reference, ids = make_run(6), make_ids()
    floor = compare(reference, make_run(6, noise=1e-3), ids)
    return quality_part(
        compare(reference, make_run(6, noise=noise), ids), floor, floor_kind="test", **limits
    ).to_dict()


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
    import json

    part = part_of(math.nan)
    assert not part["passed"]
    assert check(part, "kl divergence")["note"] == "not finite"
    json.loads(json.dumps(part, allow_nan=False))


@pytest.fixture(scope="module")
def source_model(tiny_source: Path) -> Any:
    from q38.measure.loading import load_for_measuring

    return load_for_measuring(tiny_source)


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(10, 1000, (3, 24), generator=torch.Generator().manual_seed(0))


def test_the_head_applied_to_a_run_gives_the_logits_of_the_model(
    source_model: Any, ids: torch.Tensor
) -> None:
    run = run_model(source_model, ids, batch_size=3)
    with torch.inference_mode():
        wanted = source_model(input_ids=ids, use_cache=False).logits
    assert torch.equal(run.head(run.hidden), wanted)


def test_the_last_block_feeds_the_mixer(source_model: Any, ids: torch.Tensor) -> None:
    run = run_model(source_model, ids, batch_size=2)
    with torch.inference_mode():
        mixed = source_model.get_decoder().hyper_connection_mixer(run.blocks[-1])
    assert torch.equal(mixed, run.hidden)


def test_block_outputs_stop_at_the_budget(
    source_model: Any, ids: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forward, "BLOCK_BYTES", 1)
    run = run_model(source_model, ids, batch_size=2)
    assert run.blocks.shape[1] == 1 and run.hidden.shape[0] == 3
    assert not any(layer._forward_hooks for layer in source_model.get_decoder().layers)


def test_the_other_experts_are_used_inside_and_put_back(source_model: Any) -> None:
    before = source_model.get_experts_implementation()
    with other_experts(source_model) as change:
        assert source_model.get_experts_implementation() != before
        assert " -> " in change
    assert source_model.get_experts_implementation() == before


SMALL: dict[str, Any] = {"tokens": 256, "seqlen": 64}


@pytest.fixture(scope="module")
def packed_quality(packed: Path, tiny_source: Path, tiny_ple: Path) -> dict[str, Any]:
    return measure_quality(packed, tiny_source, ple=tiny_ple, **SMALL).to_dict()


def test_two_bits_cost_more_than_the_floor_and_less_than_everything(packed_quality: dict[str, Any]) -> None:
    kl, floor = check(packed_quality, "kl divergence"), packed_quality["floor"]["kl divergence"]
    assert 10 * floor["value"] < kl["value"] < 0.1
    assert kl["checked"] == packed_quality["positions"] == 4 * 63
    assert packed_quality["sequences"] == 4
    assert len(packed_quality["text"]["sha256"]) == 64


def test_block_errors_are_above_their_floor(packed_quality: dict[str, Any], tiny_source: Path) -> None:
    layers = packed_quality["layers"]
    assert len(layers) == len(Checkpoint.open(tiny_source).config["text_config"]["layer_types"])
    assert all(0 < row["floor"] < row["relative_error"] < 1 for row in layers)


def test_the_source_measured_against_itself_is_exact(tiny_source: Path) -> None:
    part = measure_quality(tiny_source, tiny_source, tokens=128, seqlen=64).to_dict()
    assert check(part, "kl divergence")["value"] == 0
    assert check(part, "top-1 agreement")["value"] == 1


def test_a_wrong_matrix_costs_far_more_than_the_rounding(
    packed: Path, tiny_source: Path, tiny_ple: Path, tmp_path: Path, packed_quality: dict[str, Any]
) -> None:
    model = copy_model(packed, tmp_path / "model")
    edit_tensor(model, "model.language_model.layers.1.linear_attn.out_proj.scales", lambda t: -t)
    part = measure_quality(model, tiny_source, ple=tiny_ple, max_kl=0.01, **SMALL).to_dict()
    assert check(part, "kl divergence")["value"] > 10 * check(packed_quality, "kl divergence")["value"]
    assert not part["passed"]
    assert part["layers"][0]["relative_error"] == pytest.approx(packed_quality["layers"][0]["relative_error"])
    assert part["layers"][1]["relative_error"] > 2 * packed_quality["layers"][1]["relative_error"]
