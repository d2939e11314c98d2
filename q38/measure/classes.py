"""Classes of tokens, by what they stand for: a model may lose digits long before it loses words."""

from __future__ import annotations

import unicodedata
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

SPECIAL, PARTIAL = "special", "part of a character"
CLASSES = (
    "word", "continued word", "letters without case", "number", "punctuation", "white space", PARTIAL, SPECIAL,
)  # fmt: skip
_REPLACEMENT = "�"  # what a tokenizer decodes a piece of a character to


def token_classes(ids: torch.Tensor, tokenizer: Any) -> npt.NDArray[np.str_]:
    """The class of each token.

    Args:
        ids: int64, any shape.

    Returns:
        str array of the flattened ids.
    """
    unique, inverse = torch.unique(ids.flatten(), return_inverse=True)
    special = set(tokenizer.all_special_ids)
    names = [
        SPECIAL if i in special else classify_text(tokenizer.decode([i], clean_up_tokenization_spaces=False))
        for i in unique.tolist()
    ]
    table: npt.NDArray[np.str_] = np.array(names)
    found: npt.NDArray[np.str_] = table[inverse.numpy()]
    return found


def classify_text(text: str) -> str:
    """The class of one decoded token.

    A token of letters is a "word" where it starts with white space or a capital, else a "continued word" (a name
    in snake_case has one word and several continuations). Scripts without case, such as Chinese, Thai and Kana, do not
    mark where words begin: "letters without case".
    """
    if _REPLACEMENT in text:
        return PARTIAL
    body = text.strip()
    if not body:
        return "white space"
    letters = [c for c in body if c.isalpha()]
    if not letters:
        return "number" if any(c.isdigit() for c in body) else "punctuation"
    if not any(unicodedata.category(c) in ("Lu", "Ll", "Lt") for c in letters):
        return "letters without case"
    return "word" if text[0].isspace() or letters[0].isupper() else "continued word"
