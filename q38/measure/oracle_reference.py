"""The reference file of the oracle, and what must be equal before two scores may be compared.

Three things must match, or the log-probabilities belong to different questions: the prompt set, the
tokenizer (the same text must become the same ids), and the source of the weights. Everything else
may differ, because it is what a check is for: the engine and its kernels, its flags and dtype, the
layout of the files, and the weights themselves. So a model quantized from the same source can be held
against it with limits of its own, and a damaged shard ends as a failed check, not as a refusal;
`weights_match` in the result tells the two apart from a change of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.base.files import advising, has_schema, holds
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import write_json
from q38.measure.identity import model_identity
from q38.measure.oracle_prompts import PromptSet
from q38.measure.tokenizer import tokenizer_identity

SCHEMA = "q38.oracle/1"


@dataclass(frozen=True)
class Identity:
    """What the scores of one run depend on. See the module for what must match."""

    model: dict[str, str]
    tokenizer: dict[str, str]
    prompts: dict[str, str]

    @classmethod
    def of(cls, model: Path, prompts: PromptSet) -> Identity:
        return cls(
            model_identity(model),
            tokenizer_identity(model),
            {"name": prompts.name, "sha256": prompts.sha256},
        )

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def write_reference(file: Path, document: Mapping[str, Any]) -> None:
    """Write a reference file atomically."""
    write_json(file, {"schema": SCHEMA, **document})


def read_reference(file: Path) -> dict[str, Any]:
    """Read a reference file.

    Raises:
        InputError: no such file, or it is no reference of this version.
    """
    with advising("give a file that q38 oracle save wrote"):
        raw = read_json(file)
        if raw.get("schema") != SCHEMA:
            raise InputError(f"schema is '{raw.get('schema')}', not {SCHEMA}", where=file)
    scores = raw.get("scores")
    parts = all(
        isinstance(raw.get(part), dict) for part in ("model", "tokenizer", "prompts", "engine", "noise")
    )
    rows = isinstance(scores, list) and all(
        isinstance(s, dict) and "id" in s and len(s.get("tokens", ())) == len(s.get("logprobs", (0,)))
        for s in scores
    )
    if not parts or not rows:
        raise InputError(
            "its contents are damaged", where=file, remedy="make it again with q38 oracle save --fresh"
        )
    return raw


def find_reference(
    file: Path, now: Identity, engine: Mapping[str, Any], *, fresh: bool
) -> dict[str, Any] | None:
    """The reference that `file` already holds, if it is the one that saving now would make.

    A reference is what later states are judged by, so another one is not replaced in passing.

    Args:
        engine: what the engine says of itself; its name and dtype are compared.
        fresh: give None for any reference, so that it is replaced.

    Raises:
        InputError: `file` is no reference; or, without `fresh`, one of another model, weights, engine or dtype.
    """
    if not holds(file, "reference of q38 oracle save", has_schema(SCHEMA)) or fresh:
        return None
    saved = read_reference(file)
    require_comparable(file, saved, now)
    for what, before, after in (
        ("weights", saved["model"].get("weights"), now.model["weights"]),
        ("engine", saved["engine"].get("name"), engine.get("name")),
        ("dtype", saved["engine"].get("dtype"), engine.get("dtype")),
    ):
        if before != after:
            raise InputError(
                f"is a reference of another {what} ({str(before)[:16]}, now {str(after)[:16]})",
                where=file,
                remedy="choose another file, or replace it with --fresh",
            )
    return saved


def require_comparable(file: Path, reference: Mapping[str, Any], now: Identity) -> None:
    """Refuse to compare different questions.

    Raises:
        InputError: names the first of prompt set, tokenizer and source that differs, with both values.
    """
    for what, path in (
        ("prompt set", ("prompts", "sha256")),
        ("tokenizer vocabulary", ("tokenizer", "vocabulary")),
        ("tokenizer rules", ("tokenizer", "rules")),
        ("chat template", ("tokenizer", "chat_template")),
        ("source model", ("model", "source")),
    ):
        part, key = path
        before, after = str(reference.get(part, {}).get(key)), getattr(now, part)[key]
        if before != after:
            raise InputError(
                f"was made with another {what} ({before[:16]}, now {after[:16]})",
                where=file,
                remedy="compare like with like, or make a reference for this model with q38 oracle save",
            )
