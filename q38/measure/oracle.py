"""The oracle: log-probabilities of fixed continuations, saved once and compared ever after.

Teacher forcing makes it exact where comparing generated text is not: one flipped near-tie changes
every token after it, but moves a log-probability by almost nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

import q38
from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.measure.files import require_writable
from q38.measure.oracle_engine import Dtype, Engine, TransformersEngine
from q38.measure.oracle_prompts import Item, Prompt, load_prompts, tokenize
from q38.measure.oracle_reference import (
    Identity,
    find_reference,
    read_reference,
    require_comparable,
    write_reference,
)
from q38.measure.stats import Floats, clustered_mean

CHECK_SCHEMA = "q38.oracle-check/1"
Class = Literal["host", "kernel"]
# Mean and max |difference| in nats. host: the change touches no arithmetic on the device; kernel: it
# changes the order of summation. REPORTED limits of earlier public work on this model.
LIMITS: Mapping[Class, tuple[float, float | None]] = {"host": (0.01, 0.5), "kernel": (0.05, None)}
REPEATS = 2
SELF_CHECK_PROMPTS = 4


def save(
    model: Path,
    out: Path,
    *,
    ple: Path | None = None,
    prompts: Path | None = None,
    dtype: Dtype = "float32",
    repeats: int = REPEATS,
    fresh: bool = False,
    engine: Engine | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Score the prompt set and write the reference file.

    Args:
        model: checkpoint directory.
        prompts: a prompt file; default: the set that ships with q38.
        dtype: of the in-process engine.
        repeats: times the scoring is run; the spread of the runs is the noise.
        fresh: replace the reference that is there.
        engine: another engine; default: transformers in this process.

    Returns:
        The reference document.

    Raises:
        InputError: no checkpoint, broken prompts, or `out` is no reference, or one of other weights.
        CheckFailed: a damaged model or input scores like the whole one, so the oracle would be blind.
    """
    if repeats < 2:
        raise InputError(f"{repeats} repeats show no noise", where="--repeats", remedy="give 2 or more")
    chosen = load_prompts(prompts)
    identity = Identity.of(model, chosen)
    if (existing := find_reference(out, identity, dtype, fresh=fresh)) is not None:
        progress.say(f"{out} is up to date")
        return existing
    require_writable(out)
    items = _items(model, chosen.prompts)
    engine = engine or TransformersEngine(model, ple=ple, dtype=dtype)
    runs = [engine.score(items, progress=progress) for _ in range(repeats)]
    document = {
        "q38": q38.__version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **identity.to_dict(),
        "engine": engine.describe(),
        "noise": _noise(runs),
        "self_check": _self_check(engine, items, runs[0], progress),
        "scores": [
            {"id": item.id, "tokens": list(item.continuation), "logprobs": scores}
            for item, scores in zip(items, runs[0], strict=True)
        ],
    }
    write_reference(out, document)
    return document


def plan_save(
    model: Path,
    out: Path,
    *,
    prompts: Path | None = None,
    dtype: Dtype = "float32",
    repeats: int = REPEATS,
    fresh: bool = False,
) -> dict[str, Any]:
    """What `save` would do, with the same refusals. Writes nothing.

    Returns:
        {"up_to_date", "prompts", "tokens", "repeats", "writes"}.
    """
    chosen = load_prompts(prompts)
    existing = find_reference(out, Identity.of(model, chosen), dtype, fresh=fresh)
    items = _items(model, chosen.prompts)
    return {
        "dry_run": True,
        "up_to_date": existing is not None,
        "prompts": len(items),
        "tokens": sum(len(item.prompt) + len(item.continuation) for item in items),
        "repeats": repeats,
        "writes": str(out),
    }


def check(
    model: Path,
    reference: Path,
    *,
    ple: Path | None = None,
    prompts: Path | None = None,
    kind: Class = "host",
    max_mean: float | None = None,
    max_abs: float | None = None,
    dtype: Dtype | None = None,
    engine: Engine | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Score again and compare with a reference.

    Args:
        kind: class of the change under test; it sets the limits (see LIMITS).
        max_mean, max_abs: other limits for the mean and the largest |difference|, in nats.
        dtype: of the in-process engine; default: the reference's.

    Returns:
        {"passed", "mean", "max", "limits", "worst", "prompts", ...}; "worst" names prompt and token.

    Raises:
        InputError: the reference belongs to another source model, tokenizer or prompt set.
    """
    saved = read_reference(reference)
    chosen = load_prompts(prompts)
    identity = Identity.of(model, chosen)
    require_comparable(reference, saved, identity)
    items = _items(model, chosen.prompts)
    before = _logprobs(reference, saved, items)
    used = dtype or saved["engine"].get("dtype")
    if engine is None:
        engine = TransformersEngine(model, ple=ple, dtype=used if used in get_args(Dtype) else "float32")
    scores = engine.score(items, progress=progress)
    limits = _limits(kind, max_mean, max_abs)
    result = compare_scores(before, scores, limits)
    worst = _worst(model, items, before, scores)
    now = engine.describe()
    return {
        "schema": CHECK_SCHEMA,
        "q38": q38.__version__,
        "reference": str(reference),
        "class": kind,
        **result,
        "noise": saved["noise"],
        "worst": worst,
        "weights_match": identity.model["weights"] == saved["model"]["weights"],
        "engine": now,
        "engine_changes": {
            key: [saved["engine"].get(key), value]
            for key, value in now.items()
            if saved["engine"].get(key) != value
        },
        "prompts": _by_prompt(chosen.prompts, before, scores),
    }


def compare_scores(
    before: Sequence[Sequence[float]], now: Sequence[Sequence[float]], limits: Mapping[str, float | None]
) -> dict[str, Any]:
    """Mean and largest |difference| over all scored tokens, and whether they keep the limits.

    A value that is not finite counts as an infinite difference.
    """
    difference = _difference(before, now)
    flat = np.concatenate(difference)
    finite = bool(np.isfinite(flat).all())
    mean, largest = (float(flat.mean()), float(flat.max())) if finite else (math.inf, math.inf)
    labels = np.repeat(np.arange(len(difference)), [len(d) for d in difference])
    held = {"mean": limits["mean"], "max": limits["max"]}
    passed = all(
        limit is None or value <= limit for limit, value in zip(held.values(), (mean, largest), strict=True)
    )
    return {
        "passed": passed and finite,
        "mean": mean if finite else None,
        "mean_standard_error": clustered_mean(flat, labels).standard_error if finite else None,
        "max": largest if finite else None,
        "limits": held,
        "tokens": int(flat.size),
        "not_finite": int((~np.isfinite(flat)).sum()),
    }


def _items(model: Path, prompts: Sequence[Prompt]) -> list[Item]:
    from q38.hf.load import load_tokenizer

    items = tokenize(prompts, load_tokenizer(model))
    empty = next((item.id for item in items if not item.prompt or not item.continuation), None)
    if empty:
        raise InputError(
            f"prompt {empty} becomes no tokens", where=model, remedy="restore the tokenizer of the release"
        )
    return items


def _difference(before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]) -> list[Floats]:
    with np.errstate(invalid="ignore"):
        raw = [np.abs(np.asarray(a) - np.asarray(b)) for a, b in zip(before, now, strict=True)]
    return [np.where(np.isnan(d), math.inf, d) for d in raw]


def _noise(runs: Sequence[Sequence[Sequence[float]]]) -> dict[str, Any]:
    """The spread of repeated runs: every later run against the first."""
    spreads = [np.concatenate(_difference(runs[0], run)) for run in runs[1:]]
    return {
        "repeats": len(runs),
        "mean": float(np.mean([s.mean() for s in spreads])),
        "max": float(np.max([s.max() for s in spreads])),
    }


def _self_check(
    engine: Engine,
    items: Sequence[Item],
    scores: Sequence[Sequence[float]],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Two faults put in on purpose; each must fail the strictest class, on the shortest prompts alone."""
    by_length = sorted(range(len(items)), key=lambda i: len(items[i].prompt) + len(items[i].continuation))
    chosen = [items[i] for i in by_length[:SELF_CHECK_PROMPTS]]
    before = [scores[i] for i in by_length[:SELF_CHECK_PROMPTS]]
    limits = _limits("host", None, None)
    turned = [Item(item.id, item.prompt[::-1], item.continuation) for item in chosen]
    found = [("input", "prompt tokens in reverse order", engine.score(turned, progress=progress))]
    with engine.damaged() as what:
        if what is not None:
            found.append(("weight", what, engine.score(chosen, progress=progress)))
    rows = []
    for fault, what, faulty in found:
        result = compare_scores(before, faulty, limits)
        rows.append(
            {
                "fault": fault,
                "what": what,
                "mean": result["mean"],
                "max": result["max"],
                "noticed": not result["passed"],
            }
        )
        if result["passed"]:
            raise CheckFailed(
                f"the oracle does not notice a wrong {fault} ({what}: mean {result['mean']:.2g}, max {result['max']:.2g} nats)",
                where="self-check",
                remedy="the engine does not score what it is given; look there",
            )
    return rows


def _limits(kind: Class, max_mean: float | None, max_abs: float | None) -> dict[str, float | None]:
    if kind not in LIMITS:
        raise InputError(f"unknown class '{kind}'", where="--class", remedy=f"known: {', '.join(LIMITS)}")
    mean, largest = LIMITS[kind]
    return {"mean": mean if max_mean is None else max_mean, "max": largest if max_abs is None else max_abs}


def _logprobs(reference: Path, saved: Mapping[str, Any], items: Sequence[Item]) -> list[list[float]]:
    """The saved scores in the order of `items`; equal hashes make unequal tokens a damaged file."""
    rows = {row["id"]: row for row in saved["scores"]}
    if any(rows.get(item.id, {}).get("tokens") != list(item.continuation) for item in items):
        raise InputError(
            "its tokens are not those of the prompt set",
            where=reference,
            remedy="make it again with q38 oracle save",
        )
    return [rows[item.id]["logprobs"] for item in items]


def _worst(
    model: Path, items: Sequence[Item], before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]
) -> dict[str, Any]:
    """The scored token with the largest difference."""
    from q38.hf.load import load_tokenizer

    difference = _difference(before, now)
    index = int(np.argmax([d.max() for d in difference]))
    position = int(np.argmax(difference[index]))
    token = items[index].continuation[position]
    value = float(now[index][position])
    return {
        "prompt": items[index].id,
        "position": position,
        "token_id": token,
        "token": load_tokenizer(model).decode([token]),
        "reference": float(before[index][position]),
        "now": value if math.isfinite(value) else None,
    }


def _by_prompt(
    prompts: Sequence[Prompt], before: Sequence[Sequence[float]], now: Sequence[Sequence[float]]
) -> list[dict[str, Any]]:
    rows = []
    for prompt, d in zip(prompts, _difference(before, now), strict=True):
        mean, largest = float(d.mean()), float(d.max())
        rows.append(
            {
                "id": prompt.id,
                "kind": prompt.kind,
                "language": prompt.language,
                "tokens": len(d),
                "mean": mean if math.isfinite(mean) else None,
                "max": largest if math.isfinite(largest) else None,
            }
        )
    return rows
