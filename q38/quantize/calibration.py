"""Calibration tokens: rows of exactly the asked length, so that no engine drops or pads one."""

from __future__ import annotations

import hashlib
import random
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from q38.model.text import Texts, pack_tokens
from q38.recipe.schema import Calibration as CalibrationRecipe

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Facts:
    """What a run was calibrated on; goes into its manifest.

    text_sha256 covers the texts in the order of their source, tokens_sha256 the token ids in the order
    they were used (int64, little-endian).
    """

    origin: str
    text_sha256: str
    tokens_sha256: str
    samples: int
    seqlen: int
    tokens_used: int
    tokens_available: int

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
    rows = list(texts.texts)
    random.Random(recipe.seed).shuffle(rows)
    if recipe.chat_template:
        rows = [
            tokenizer.apply_chat_template([{"role": "user", "content": row}], tokenize=False) for row in rows
        ]
    packed = pack_tokens(
        rows,
        tokenizer,
        length=recipe.seqlen,
        count=recipe.samples,
        where=f"calibration.text ({texts.origin})",
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
    )
    return packed.ids, facts
