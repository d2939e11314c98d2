"""Calibration tokens: rows of exactly the asked length, so that no engine drops or pads one."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from q38.model.text import Texts, pack_tokens, text_hash
from q38.recipe.schema import Calibration as CalibrationRecipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Facts:
    """What a run was calibrated on; goes into its manifest.

    text_sha256 covers the texts in the order of their source, tokens_sha256 the token ids in the order
    they were used (int64, little-endian). languages: tokens used per language. text_hashes: of every text that
    lies in the sequences wholly or in part (`q38.model.text.text_hash`), so that a later evaluation can tell.
    """

    origin: str
    text_sha256: str
    tokens_sha256: str
    samples: int
    seqlen: int
    tokens_used: int
    tokens_available: int
    languages: dict[str, int]
    text_hashes: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def calibration_tokens(texts: Texts, tokenizer: Any, recipe: CalibrationRecipe) -> tuple[torch.Tensor, Facts]:
    """Tokenize the texts into rows.

    Args:
        texts: the "calibration" split of the recipe's text.
        tokenizer: a transformers tokenizer.

    Returns:
        int64 [samples, seqlen], and what they are.

    Raises:
        InputError: the text has fewer than samples x seqlen tokens.
    """
    order = list(range(len(texts.texts)))
    random.Random(recipe.seed).shuffle(order)
    raw = [texts.texts[i] for i in order]
    rows = raw
    if recipe.chat_template:
        rows = [
            tokenizer.apply_chat_template([{"role": "user", "content": row}], tokenize=False) for row in raw
        ]
    packed = pack_tokens(
        rows,
        tokenizer,
        length=recipe.seqlen,
        count=recipe.samples,
        where=f"calibration.text ({texts.origin})",
        languages=[texts.languages[i] for i in order] if texts.languages else (),
    )
    digest = hashlib.sha256(packed.ids.numpy().astype("<i8").tobytes()).hexdigest()
    facts = Facts(
        origin=texts.origin,
        text_sha256=texts.sha256,
        tokens_sha256=digest,
        samples=recipe.samples,
        seqlen=recipe.seqlen,
        tokens_used=packed.tokens_used,
        tokens_available=packed.tokens_available,
        languages={name: n * recipe.seqlen for name, n in Counter(packed.languages).items()},
        text_hashes=sorted(text_hash(raw[i]) for i in packed.used),
    )
    return packed.ids, facts
