"""The oracle through the KV cache: long prompts in chunks, and a cache that is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q38.measure.oracle import check, save
from q38.measure.oracle_engine import TransformersEngine
from q38.measure.oracle_prompts import load_prompts, tokenize
from tests.measure.packed import copy_model, edit_tensor
from tests.measure.test_oracle import write_prompts

LONG = [
    {"id": "long", "kind": "long", "language": "en", "prompt": "The mill ground barley. The smith sang. " * 30, "continuation": " The mill ground barley."},
    {"id": "text", "kind": "text", "language": "en", "prompt": "The tide mill ground barley for", "continuation": " three hundred years."},
]  # fmt: skip


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("prompts") / "long.json", LONG)


@pytest.fixture(scope="module")
def engine(packed: Path, tiny_ple: Path) -> TransformersEngine:
    return TransformersEngine(packed, ple=tiny_ple, chunk=64)


@pytest.fixture(scope="module")
def reference(
    packed: Path, prompts: Path, engine: TransformersEngine, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    file = tmp_path_factory.mktemp("reference") / "ref.json"
    save(packed, file, prompts=prompts, engine=engine)
    return file


def test_reading_in_chunks_scores_as_reading_at_once(
    packed: Path, prompts: Path, engine: TransformersEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from q38.hf.load import load_tokenizer

    item = tokenize(load_prompts(prompts).prompts, load_tokenizer(packed))[0]
    assert len(item.prompt) > 3 * 64
    (chunked,) = engine.score([item])
    monkeypatch.setattr(engine, "chunk", len(item.prompt) + len(item.continuation))
    (whole,) = engine.score([item])
    assert chunked == pytest.approx(whole, abs=1e-3)


def test_a_cache_that_forgets_its_first_chunks_is_noticed(
    packed: Path, prompts: Path, engine: TransformersEngine, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.cache_utils import DynamicLayer

    keep = DynamicLayer.update

    def zeroed(self: DynamicLayer, *args: torch.Tensor, **kwargs: object) -> object:
        keys, values = keep(self, *args, **kwargs)
        keys[..., :64, :], values[..., :64, :] = 0, 0
        return keys, values

    monkeypatch.setattr(DynamicLayer, "update", zeroed)
    # An untrained model hardly uses what it read, so the limit is its noise, which is zero here.
    result = check(packed, reference, prompts=prompts, engine=engine, times_noise=5)
    by_id = {row["id"]: row for row in result["prompts"]}
    assert not result["passed"] and result["worst"]["prompt"] == "long"
    assert by_id["long"]["max"] > 1e-4
    assert by_id["text"]["max"] < 1e-5  # a short prompt never reads the cache


def test_values_that_are_zero_in_one_layer_fail_and_name_the_block(
    packed: Path, tiny_ple: Path, prompts: Path, reference: Path, tmp_path: Path
) -> None:
    model = copy_model(packed, tmp_path / "model")
    edit_tensor(model, "model.language_model.layers.3.self_attn.v_proj.scales", torch.zeros_like)
    result = check(model, reference, ple=tiny_ple, prompts=prompts)
    assert not result["passed"]
    assert result["layers"]["worst"]["block"] == 3
