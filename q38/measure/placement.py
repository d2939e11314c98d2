"""Build a routing profile: run text through the model and count what its routers choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import q38
from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import first_difference, package_versions
from q38.measure.files import require_writable
from q38.measure.identity import model_identity
from q38.model.shape import ModelShape
from q38.model.text import STDLIB, Split, load_texts, pack_tokens
from q38.recipe.budget import expert_row_bytes
from q38.residency.placement import default_sizes, held_out_coverage, own_coverage
from q38.residency.profile import (
    MIN_TOKENS,
    Profile,
    is_there,
    load,
    load_halves,
    recording,
    require_tokens,
    save,
)
from q38.residency.trace import Trace, refuse_other, write_trace

SCHEMA = "q38.placement/1"
SEQLEN = 128
BATCH = 4  # sequences per forward
SPLIT: Split = "calibration"  # not the text that quality is measured on


def build_placement(
    model: Path,
    out: Path,
    *,
    ple: Path | None = None,
    text: str = "stdlib",
    tokens: int = 4096,
    seqlen: int = SEQLEN,
    sizes: Sequence[int] | None = None,
    trace: Path | None = None,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Trace routing on sample text, write the profile, and test it on held-out text.

    The profile is of the whole trace. Its worth is measured by halves: what one half of the sequences
    would place in device memory is tested on the other half.

    Args:
        model: checkpoint directory.
        out: the profile, a safetensors file (see q38.residency.profile).
        text: "stdlib" or a JSONL file; its calibration split is used.
        tokens: tokens to trace, at least MIN_TOKENS; rounded down to an even number of sequences.
        seqlen: tokens per sequence.
        sizes: values of S, resident experts per layer; default a range of them.
        trace: also write the raw routing trace to this file (q38.residency.trace).
        fresh: replace a profile of another model or text.

    Returns:
        {"schema", "file", "tokens", "up_to_date", "layers", "experts", "unseen", "coverage": [...], "metadata"};
        see `held_out_coverage` and `report` for a row of the coverage; "unseen" counts experts never selected.

    Raises:
        InputError: too few tokens, too little text, no checkpoint, or `out` or `trace` holds something else.
    """
    plan = plan_placement(model, out, text=text, tokens=tokens, seqlen=seqlen, trace=trace, fresh=fresh)
    up_to_date = plan["up_to_date"] and (trace is None or trace.exists())
    if up_to_date:
        progress.say(f"{out} is up to date")
    else:
        for file in (out, trace) if trace else (out,):
            require_writable(file)
        recorded = _record(model, ple, text, plan["sequences"], seqlen, progress)
        whole = replace(Profile.of_trace(recorded), metadata=plan["metadata"])
        first, second = recorded.split(recorded.tokens // 2)
        save(whole, out, halves=(Profile.of_trace(first), Profile.of_trace(second)))
        if trace is not None:
            write_trace(trace, recorded)
    return report(out, model, sizes, up_to_date=up_to_date)


def report(out: Path, model: Path, sizes: Sequence[int] | None, *, up_to_date: bool) -> dict[str, Any]:
    """What a written profile is worth: see `build_placement`.

    `host_bytes` of a coverage row: bytes of expert rows per token that are read from host memory, at the hit
    rate of the held-out half, or of the profile itself where nothing is held out.
    """
    profile, halves = load(out), load_halves(out)
    row = _row_bytes(Checkpoint.open(model).config)
    coverage = []
    for size in sizes or default_sizes(profile.experts):
        found = held_out_coverage(halves, size) if halves else own_coverage(profile, size)
        miss = 1 - (found["equal"] or found["built"])["selections"]
        coverage.append({**found, "host_bytes": round(miss * row * profile.count.sum() / profile.tokens)})
    return {
        "schema": SCHEMA,
        "file": str(out),
        "up_to_date": up_to_date,
        "tokens": profile.tokens,
        "layers": profile.layers,
        "experts": profile.experts,
        "unseen": int((profile.count == 0).sum()),
        "coverage": coverage,
        "metadata": dict(profile.metadata),
    }


def _row_bytes(config: dict[str, Any]) -> int:
    """Bytes of one expert row: as the checkpoint is packed, else as the default recipe packs it."""
    packed = config.get("quantization_config") or {}
    bits, group = packed.get("bits"), packed.get("group_size")
    if type(bits) is not int or type(group) is not int or group < 1:
        bits, group = 2, 128
    return expert_row_bytes(ModelShape.from_config(config), bits, group)


def plan_placement(
    model: Path,
    out: Path,
    *,
    text: str = "stdlib",
    tokens: int = 4096,
    seqlen: int = SEQLEN,
    trace: Path | None = None,
    fresh: bool = False,
) -> dict[str, Any]:
    """What `build_placement` would do, with the same refusals. Writes nothing.

    Returns:
        {"up_to_date", "sequences", "tokens", "writes", "bytes", "metadata"}.
    """
    require_tokens(tokens, where="--tokens")
    if trace is not None:
        refuse_other(trace)
    sequences = tokens // seqlen // 2 * 2 if seqlen > 0 else 0
    if sequences * seqlen < MIN_TOKENS:
        raise InputError(
            f"{tokens} tokens make {sequences} sequences of {seqlen} in two equal halves",
            where="--seqlen",
            remedy=f"give shorter sequences, so that {MIN_TOKENS} tokens are traced",
        )
    shape = ModelShape.from_config(Checkpoint.open(model).config)
    identity = model_identity(model)
    texts = load_texts(text, SPLIT)
    versions = package_versions()
    metadata: dict[str, str] = {
        "model_source": identity["source"],
        "model_weights": identity["weights"],
        "text": text if text == STDLIB else Path(text).name,
        "text_sha256": texts.sha256,
        "split": SPLIT,
        "seqlen": str(seqlen),
        "sequences": str(sequences),
        "q38": q38.__version__,
        **{name: versions[name] for name in ("torch", "transformers") if name in versions},
    }
    cells = shape.num_layers * shape.num_experts
    return {
        "dry_run": True,
        "up_to_date": is_up_to_date(out, metadata, fresh=fresh),
        "sequences": sequences,
        "tokens": sequences * seqlen,
        "writes": str(out),
        "bytes": 2 * cells * (8 + 4),
        "metadata": metadata,
    }


def _record(
    model: Path, ple: Path | None, text: str, sequences: int, seqlen: int, progress: Progress
) -> Trace:
    """Run the text through the model, one sequence after the other."""
    from q38.hf.hooks import qsa_shortcut
    from q38.hf.load import load_tokenizer
    from q38.measure.loading import load_for_measuring

    texts = load_texts(text, SPLIT).texts
    ids = pack_tokens(texts, load_tokenizer(model), length=seqlen, count=sequences, where=text).ids
    loaded = load_for_measuring(model, ple=ple)
    with (
        qsa_shortcut(),
        torch.inference_mode(),
        recording(loaded) as traces,
        progress.task("trace", ids.numel(), "tokens") as task,
    ):
        for start in range(0, sequences, BATCH):
            batch = ids[start : start + BATCH]  # [B, T]
            loaded.model(input_ids=batch, use_cache=False)
            task.advance(batch.numel())
    return traces[0]


def is_up_to_date(out: Path, metadata: Mapping[str, str], *, fresh: bool, halves: bool = True) -> bool:
    """Whether `out` already is the profile that would be made; `halves`: with the two halves of its trace.

    Raises:
        InputError: it is no profile; or, without `fresh`, a profile of something else.
    """
    if not is_there(out) or fresh:
        return False
    found = load(out)
    if difference := first_difference(dict(found.metadata), dict(metadata)):
        key, before, now = difference
        raise InputError(
            f"is a profile with another {key} ({before}, now {now})",
            where=out,
            remedy="choose another file, or replace it with --fresh",
        )
    return not halves or load_halves(out) is not None
