"""Verify a checkpoint: structure, numbers, and quality against its source. One report, one verdict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import q38
from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import package_versions, read_manifest
from q38.measure.checks import Check, Part
from q38.measure.evaluate import DTYPES, Dtype, measure_quality
from q38.measure.files import check_shards
from q38.measure.numbers import check_numbers
from q38.measure.stored import Stored
from q38.measure.structure import check_structure

SCHEMA = "q38.verify/1"
PARTS = ("structure", "numbers", "quality")
MIN_SEQLEN = 16


def verify(
    model: Path,
    *,
    source: Path | None = None,
    ple: Path | None = None,
    parts: Sequence[str] | None = None,
    text: str = "multilingual",
    tokens: int = 4096,
    seqlen: int = 256,
    max_kl: float | None = None,
    min_top1: float | None = None,
    dtype: Dtype = "bfloat16",
    device: str = "auto",
    memory: int | None = None,
    report: Path | None = None,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Check a checkpoint and measure it against its source.

    Args:
        model: a packed or unpacked Qwen4-Exp checkpoint.
        source: the checkpoint it was made from; without it numbers are checked for themselves and
            quality is left out.
        ple: directory of the split n-gram table.
        parts: which of "structure", "numbers" and "quality" to run; default all, quality only with a source.
        text, tokens, seqlen, dtype, device, memory, report, fresh: of the quality part, see
            `q38.measure.evaluate.measure_quality`.
        max_kl: mean KL divergence in nats above which quality fails.
        min_top1: top-1 agreement below which quality fails.

    Returns:
        The report: {"schema", "model", "source", "passed", "parts": [...], ...}. Each part has its
        checks, each check its value, standard error and limit.

    Raises:
        InputError: wrong options, no checkpoint at `model` or `source`, too little text.
        ResourceError: the memory does not suffice for the quality part.
    """
    _check_options(parts, tokens, seqlen, max_kl, min_top1, dtype)
    _require_measured(parts, source, max_kl, min_top1)
    parts = PARTS if parts is None else parts
    stored = Stored.open(model)
    origin = Checkpoint.open(source) if source else None
    done: list[Part] = []
    if "structure" in parts:
        done.append(check_structure(stored, source=source, ple=ple, progress=progress))
    if "numbers" in parts:
        done.append(_numbers(stored, origin, progress))
    if "quality" in parts:
        if source is None:
            done.append(Part("quality", [Check.skipped("quality", "needs --source")]))
        elif not all(part.passed for part in done):
            done.append(
                Part("quality", [Check.skipped("quality", "left out because an earlier part failed")])
            )
        else:
            done.append(
                measure_quality(
                    model,
                    source,
                    ple=ple,
                    text=text,
                    tokens=tokens,
                    seqlen=seqlen,
                    max_kl=max_kl,
                    min_top1=min_top1,
                    dtype=dtype,
                    device=device,
                    memory=memory,
                    report=report,
                    fresh=fresh,
                    progress=progress,
                )
            )
    return {
        "schema": SCHEMA,
        "q38": q38.__version__,
        "versions": package_versions(),
        "model": str(model),
        "source": str(source) if source else None,
        "passed": all(part.passed for part in done),
        "parts": [part.to_dict() for part in done],
    }


def _require_measured(
    parts: Sequence[str] | None, source: Path | None, max_kl: float | None, min_top1: float | None
) -> None:
    """A limit that nothing is compared with, or a part that cannot run, must not end as passed."""
    limits = {"--max-kl": max_kl, "--min-top1": min_top1}
    given = [option for option, limit in limits.items() if limit is not None]
    if given and parts is not None and "quality" not in parts:
        raise InputError("is a limit of the part quality", where=given[0], remedy="add quality to --parts")
    if source is None and (given or "quality" in (parts or ())):
        raise InputError(
            "needs the checkpoint that MODEL was made from",
            where=given[0] if given else "--parts quality",
            remedy="give it with --source",
        )


def _numbers(stored: Stored, origin: Checkpoint | None, progress: Progress) -> Part:
    part = check_numbers(stored.checkpoint, origin, progress=progress)
    manifest = read_manifest(stored.root)
    if manifest is None:
        part.checks.append(Check.skipped("shard hashes", "no MANIFEST.json"))
    else:
        part.checks.append(check_shards(stored.root, manifest, progress=progress))
    return part


def _check_options(
    parts: Sequence[str] | None,
    tokens: int,
    seqlen: int,
    max_kl: float | None,
    min_top1: float | None,
    dtype: str,
) -> None:
    unknown = [part for part in parts or () if part not in PARTS]
    if unknown or (parts is not None and not parts):
        raise InputError(
            f"unknown part '{unknown[0]}'" if unknown else "no part chosen",
            where="--parts",
            remedy=f"known: {', '.join(PARTS)}",
        )
    if seqlen < MIN_SEQLEN or tokens < seqlen:
        raise InputError(
            f"{tokens} tokens in sequences of {seqlen}",
            where="--tokens, --seqlen",
            remedy=f"sequences need at least {MIN_SEQLEN} tokens, and one of them must fit",
        )
    if dtype not in DTYPES:
        raise InputError(f"unknown dtype '{dtype}'", where="--dtype", remedy=f"known: {', '.join(DTYPES)}")
    if max_kl is not None and not max_kl > 0:
        raise InputError(f"{max_kl} is not positive", where="--max-kl", remedy="give nats, for example 0.1")
    if min_top1 is not None and not 0 < min_top1 <= 1:
        raise InputError(
            f"{min_top1} is no share", where="--min-top1", remedy="give a share, for example 0.9"
        )
