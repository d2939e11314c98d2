"""Classes of tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q38.hf.load import load_tokenizer
from q38.measure.classes import CLASSES, SPECIAL, classify_text, token_classes


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" word", "word"), ("\tdef", "word"), ("Name", "word"), ("ing", "continued word"), ("_id", "continued word"),
        (" 12", "number"), ("7", "number"), ("x1", "continued word"), (" +", "punctuation"), ("。", "punctuation"),
        ("\n\n    ", "white space"), ("", "white space"), ("中文", "letters without case"), ("ภาษา", "letters without case"),
        ("カナ", "letters without case"), ("\ufffd", "part of a character"), (" \ufffd", "part of a character"),
        (" über", "word"), ("ß", "continued word"),
    ],
)  # fmt: skip
def test_a_token_has_the_class_of_its_text(text: str, wanted: str) -> None:
    assert classify_text(text) == wanted
    assert wanted in CLASSES


def test_tokens_of_a_text_get_the_classes_of_their_pieces(tiny_source: Path) -> None:
    tokenizer = load_tokenizer(tiny_source)
    ids = tokenizer("return 12 + x\n").input_ids
    found = token_classes(torch.tensor([[*ids, tokenizer.pad_token_id]]), tokenizer)
    assert len(found) == len(ids) + 1
    assert found[-1] == SPECIAL
    by_piece = dict(zip((tokenizer.decode([i]) for i in ids), found[:-1], strict=True))
    assert by_piece["return"] == "continued word" if "return" in by_piece else True
    assert by_piece[" +"] == "punctuation"
