"""Which tokenizer a checkpoint has, apart from how its files were written.

Libraries write the same tokenizer in different ways (merges as strings or pairs, templates inside or
beside tokenizer_config.json), so hashes of the files would tell equal tokenizers apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.measure.identity import digest

TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"


def tokenizer_identity(root: Path) -> dict[str, str]:
    """Hashes of what turns text into token ids.

    Returns:
        {"vocabulary": token -> id with the merges and the added tokens,
         "rules": normalizer and pre-tokenizer, "chat_template": the template's text}.

    Raises:
        InputError: a file is missing or not the JSON of a tokenizer.
    """
    raw = read_tokenizer(root)
    model = raw["model"]
    merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges") or []]
    added = {t["content"]: t["id"] for t in raw.get("added_tokens") or []}
    return {
        "vocabulary": digest([{**model["vocab"], **added}, merges]),
        "rules": digest([raw.get("normalizer"), raw.get("pre_tokenizer")]),
        "chat_template": digest(chat_template(root)),
    }


def read_tokenizer(root: Path) -> dict[str, Any]:
    """tokenizer.json with a vocabulary that maps strings to ids."""
    raw = read_json(root / TOKENIZER)
    model = raw.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("vocab"), Mapping):
        raise InputError(
            "has no vocabulary", where=root / TOKENIZER, remedy="restore tokenizer.json of the release"
        )
    return raw


def token_ids(raw: Mapping[str, Any]) -> dict[str, int]:
    """Every token of the vocabulary and its id, added tokens included."""
    return {**raw["model"]["vocab"], **{t["content"]: t["id"] for t in raw.get("added_tokens") or []}}


def chat_template(root: Path) -> str | None:
    """The chat template, from its own file or from tokenizer_config.json."""
    if (root / TEMPLATE).exists():
        return (root / TEMPLATE).read_text(encoding="utf-8", errors="replace")
    template = read_json(root / TOKENIZER_CONFIG).get("chat_template")
    return template if isinstance(template, str) else None
