"""The oracle: log-probabilities of fixed continuations, saved once and compared ever after.

Teacher forcing makes it exact where comparing generated text is not: one flipped near-tie changes
every token after it, but moves a log-probability by almost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import q38
from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.measure.files import require_writable
from q38.measure.oracle_compare import Scores, by_prompt, compare_scores, noise_of, worst_token
from q38.measure.oracle_engine import Dtype, Engine, TransformersEngine
from q38.measure.oracle_layers import read_states, states_file, write_states
from q38.measure.oracle_limits import Class, Limits, limits_of
from q38.measure.oracle_prompts import Item, Prompt, load_prompts, tokenize
from q38.measure.oracle_reference import (
    Identity,
    find_reference,
    read_reference,
    require_comparable,
    write_reference,
)

CHECK_SCHEMA = "q38.oracle-check/2"
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
    kind = {"name": "transformers", "dtype": dtype} if engine is None else engine.describe()
    if (existing := find_reference(out, identity, kind, fresh=fresh)) is not None:
        progress.say(f"{out} is up to date")
        return existing
    require_writable(out)
    items = _items(model, chosen.prompts)
    engine = engine or TransformersEngine(model, ple=ple, dtype=dtype)
    runs = [engine.score(items, progress=progress) for _ in range(repeats)]
    noise = noise_of(runs)
    document = {
        "q38": q38.__version__,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        **identity.to_dict(),
        "engine": engine.describe(),
        "noise": noise,
        "self_check": _self_check(engine, items, runs[0], noise, progress),
        "layers": _save_states(engine, _shortest(items, 1)[0], out),
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
    engine: Mapping[str, Any] | None = None,
    repeats: int = REPEATS,
    fresh: bool = False,
) -> dict[str, Any]:
    """What `save` would do, with the same refusals. Writes nothing.

    Args:
        engine: what the engine would say of itself.

    Returns:
        {"up_to_date", "prompts", "tokens", "repeats", "writes"}.
    """
    chosen = load_prompts(prompts)
    kind = engine or {"name": "transformers", "dtype": "float32"}
    existing = find_reference(out, Identity.of(model, chosen), kind, fresh=fresh)
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
    max_nll: float | None = None,
    times_noise: float | None = None,
    without_layers: bool = False,
    dtype: Dtype | None = None,
    engine: Engine | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Score again and compare with a reference.

    Args:
        kind: class of the change under test; it sets the limits (see `q38.measure.oracle_limits`).
        max_mean, max_abs, max_nll, times_noise: other limits, in nats and in times the noise.
        without_layers: judge the kernel class although no blocks were compared.
        dtype: of the in-process engine; default: the reference's.

    Returns:
        {"passed", "mean", "max", "nll", "limits", "worst", "prompts", "layers", ...}; "worst" names
        prompt and token.

    Raises:
        InputError: the reference belongs to another source model, tokenizer or prompt set; or the
            kernel class without blocks to compare.
    """
    saved = read_reference(reference)
    chosen = load_prompts(prompts)
    identity = Identity.of(model, chosen)
    require_comparable(reference, saved, identity)
    limits = limits_of(
        kind,
        saved["noise"],
        max_mean=max_mean,
        max_abs=max_abs,
        max_nll=max_nll,
        times_noise=times_noise,
    )
    items = _items(model, chosen.prompts)
    before = _logprobs(reference, saved, items)
    used = dtype or saved["engine"].get("dtype")
    if engine is None:
        engine = TransformersEngine(model, ple=ple, dtype=used if used in get_args(Dtype) else "float32")
    layers = _compare_layers(engine, saved, reference, items, limits, required=not without_layers)
    scores = engine.score(items, progress=progress)
    result = compare_scores(before, scores, limits)
    result["limits"] = limits.to_dict()
    result["passed"] = result["passed"] and layers["passed"] is not False
    now = engine.describe()
    return {
        "schema": CHECK_SCHEMA,
        "q38": q38.__version__,
        "reference": str(reference),
        "class": kind,
        **result,
        "noise": saved["noise"],
        "worst": _worst(model, items, before, scores),
        "layers": layers,
        "weights_match": identity.model["weights"] == saved["model"]["weights"],
        "engine": now,
        "engine_changes": {
            key: [saved["engine"].get(key), value]
            for key, value in now.items()
            if saved["engine"].get(key) != value
        },
        "prompts": by_prompt(chosen.prompts, before, scores),
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


def _shortest(items: Sequence[Item], count: int) -> list[Item]:
    return sorted(items, key=lambda item: len(item.prompt) + len(item.continuation))[:count]


def _self_check(
    engine: Engine,
    items: Sequence[Item],
    scores: Scores,
    noise: Mapping[str, Any],
    progress: Progress,
) -> list[dict[str, Any]]:
    """Two faults put in on purpose; each must fail the strictest class, on the shortest prompts alone.

    With the limits that this noise leaves: an engine too noisy to show a fault is of no use either.
    """
    chosen = _shortest(items, SELF_CHECK_PROMPTS)
    found_scores = dict(zip((item.id for item in items), scores, strict=True))
    before = [found_scores[item.id] for item in chosen]
    limits = limits_of("host", noise)
    turned = [Item(item.id, item.prompt[::-1], item.continuation) for item in chosen]
    found = [("input", "prompt tokens in reverse order", engine.score(turned, progress=progress))]
    with engine.damaged() as what:
        if what is not None:
            found.append(("weight", what, engine.score(chosen, progress=progress)))
    rows = []
    for fault, what, faulty in found:
        result = compare_scores(before, faulty, limits)
        noticed = not result["passed"]
        rows.append(
            {"fault": fault, "what": what, "mean": result["mean"], "max": result["max"], "noticed": noticed}
        )
        if not noticed:
            raise CheckFailed(
                f"the oracle does not notice a wrong {fault} ({what}: mean {result['mean']:.2g}, max {result['max']:.2g} nats)",
                where="self-check",
                remedy="the engine does not score what it is given, or is too noisy; look there",
            )
    return rows


def _save_states(engine: Engine, item: Item, out: Path) -> dict[str, Any] | None:
    states = engine.record_states(item)
    if not states:
        states_file(out).unlink(missing_ok=True)
        return None
    return {
        "prompt": item.id,
        "blocks": len(states) - 1,
        "file": states_file(out).name,
        "sha256": write_states(out, states),
    }


def _compare_layers(
    engine: Engine,
    saved: Mapping[str, Any],
    reference: Path,
    items: Sequence[Item],
    limits: Limits,
    *,
    required: bool,
) -> dict[str, Any]:
    """{"compared", "passed", "limit", "worst", "blocks"}; passed is None where the class does not judge blocks."""
    about = saved.get("layers")
    judged = limits.layer is not None
    errors: list[float] = []
    if about and engine.takes_states and (judged or states_file(reference).is_file()):
        item = next(item for item in items if item.id == about["prompt"])
        errors = engine.layer_errors(item, read_states(reference))
    if not errors:
        if judged and required:
            why = "the reference has no states of blocks" if engine.takes_states else "this engine takes none"
            raise InputError(
                f"the kernel class compares each block on identical inputs, and {why}",
                where="--class",
                remedy="compare with transformers first, then judge by the mean alone with --without-layers",
            )
        return {"compared": False, "passed": None, "limit": limits.layer, "worst": None, "blocks": []}
    worst = max(range(len(errors)), key=errors.__getitem__)
    passed = all(error <= limits.layer for error in errors) if limits.layer is not None else None
    return {
        "compared": True,
        "passed": passed,
        "limit": limits.layer,
        "worst": {"block": worst, "relative_error": errors[worst]},
        "blocks": errors,
    }


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


def _worst(model: Path, items: Sequence[Item], before: Scores, now: Scores) -> dict[str, Any]:
    """`worst_token` with the token's text."""
    from q38.hf.load import load_tokenizer

    worst = worst_token(items, before, now)
    return {**worst, "token": load_tokenizer(model).decode([worst["token_id"]])}
