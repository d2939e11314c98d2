"""Calibration rows: none dropped, none short, the same every time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError
from q38.hf.load import load_tokenizer
from q38.measure.evaluate import calibrated_on, measure_quality
from q38.model.text import Texts, load_texts, text_hash
from q38.quantize.calibration import calibration_tokens
from q38.recipe.schema import Calibration


@pytest.fixture(scope="module")
def tokenizer(tiny_source: Path) -> Any:
    return load_tokenizer(tiny_source)


TEXTS = Texts([f"def function_{i}(x):\n    return x + {i}\n" for i in range(200)], "sha", "test texts")


def test_every_row_has_exactly_the_asked_length(tokenizer: Any) -> None:
    ids, facts = calibration_tokens(TEXTS, tokenizer, Calibration(samples=9, seqlen=32))
    assert ids.shape == (9, 32)
    assert ids.dtype == torch.int64
    assert facts.tokens_used == 9 * 32 <= facts.tokens_available
    assert (facts.origin, facts.text_sha256) == ("test texts", "sha")


def test_the_same_seed_gives_the_same_rows_and_another_seed_others(tokenizer: Any) -> None:
    first, again, other = (
        calibration_tokens(TEXTS, tokenizer, Calibration(samples=4, seqlen=32, seed=seed))
        for seed in (0, 0, 1)
    )
    assert torch.equal(first[0], again[0])
    assert first[1].tokens_sha256 == again[1].tokens_sha256 != other[1].tokens_sha256


def test_a_chat_template_wraps_every_text(tokenizer: Any) -> None:
    ids, _ = calibration_tokens(TEXTS, tokenizer, Calibration(samples=4, seqlen=64, chat_template=True))
    assert int((ids == tokenizer.convert_tokens_to_ids("<|im_start|>")).sum()) >= 4


def test_too_little_text_is_refused_with_the_shortfall(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"test texts.*tokens for 1000 sequences of 64 \(64,000 tokens\)"):
        calibration_tokens(TEXTS, tokenizer, Calibration(samples=1000, seqlen=64))


def test_the_facts_name_the_texts_that_were_used_and_the_tokens_of_each_language(tokenizer: Any) -> None:
    texts = Texts(TEXTS.texts, "sha", "test texts", ["en"] * 100 + ["de"] * 100)
    _, facts = calibration_tokens(texts, tokenizer, Calibration(samples=8, seqlen=32))
    assert facts.languages == {"en": 4 * 32, "de": 4 * 32}
    every = {text_hash(text) for text in TEXTS.texts}
    assert set(facts.text_hashes) < every
    assert 8 <= len(facts.text_hashes) < 100


def test_a_template_does_not_change_which_texts_are_named(tokenizer: Any) -> None:
    _, facts = calibration_tokens(TEXTS, tokenizer, Calibration(samples=4, seqlen=64, chat_template=True))
    assert set(facts.text_hashes) <= {text_hash(text) for text in TEXTS.texts}


def test_the_manifest_of_a_tuned_model_refuses_an_evaluation_on_its_own_text(
    tiny_quantized: Path, tiny_source: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    used = set(calibrated_on(tiny_quantized) or ())
    rows = [t for t in load_texts("stdlib", "calibration").texts if text_hash(t) in used]
    assert rows
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": t, "split": "held_out"}) + "\n" for t in rows))
    with pytest.raises(InputError, match="calibrated on"):
        measure_quality(tiny_quantized, tiny_source, ple=tiny_ple, text=str(path), tokens=64, seqlen=32)
