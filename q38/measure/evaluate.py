"""Quality of a checkpoint against its source, block-streamed: what `q38 verify` calls its quality part."""

from __future__ import annotations

import hashlib
import re
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from q38.base.errors import InputError, ResourceError
from q38.base.memory import peak_memory, reset_peak, resident_memory
from q38.base.progress import SILENT, Progress
from q38.base.units import format_bytes
from q38.checkpoint.index import read_json
from q38.checkpoint.job import Job, read_manifest
from q38.checkpoint.writer import require_free_space
from q38.measure.checks import Part
from q38.model.text import Texts, load_texts, pack_tokens, text_hash

if TYPE_CHECKING:
    import torch

    from q38.hf.blocks import BlockModel
    from q38.measure.needs import Need

Dtype = Literal["bfloat16", "float32"]
DTYPES: tuple[Dtype, ...] = ("bfloat16", "float32")
REPORT = "quality.json"
# Tokens at a time: beyond these a batch gains no speed, and its activations rival the block.
_BATCH_CPU, _BATCH_GPU = 1024, 8192
_SHAPE = ("layer_types", "hidden_size", "vocab_size", "hc_count")


@dataclass(frozen=True)
class HeldOut:
    """The tokens to measure on.

    ids: int64 [sequences, T].
    languages: one label per sequence.
    """

    ids: torch.Tensor
    languages: list[str]
    texts: Texts
    source: str
    hashes: list[str]

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.ids.numpy().astype("<i8").tobytes()).hexdigest()


def measure_quality(
    model: Path,
    source: Path,
    *,
    ple: Path | None = None,
    text: str = "stdlib",
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
) -> Part:
    """Run source and model over the same held-out tokens, one block at a time, and compare them.

    Args:
        model, source: any two checkpoints of one shape: bf16, FP8 or packed.
        text: see `q38.model.text`; its held-out split is used.
        tokens, seqlen: about `tokens` tokens in sequences of `seqlen`.
        dtype: of the arithmetic. In float32 the noise floor is lower; bfloat16 is what is served.
        device: "cpu", "cuda", "cuda:N" or "auto".
        memory: host bytes it may take; default: what is available.
        report: directory for quality.json, quality.md, the plots, and the state that a killed run
            resumes from. Without it the residual streams lie in memory.
        fresh: start the report over.

    Raises:
        InputError: the models differ in shape, a text of the evaluation was calibrated on, too little
            text, or `report` belongs to another evaluation.
        ResourceError: no such device; the memory or the disk of `report` does not suffice; names the shortfall.
    """
    import torch

    from q38.hf.blocks import BlockModel
    from q38.hf.load import load_tokenizer
    from q38.measure.loading import holds_table
    from q38.measure.quality import read_part, with_limits

    place = resolve_device(device)
    tokenizer = load_tokenizer(model)
    held_out = held_out_tokens(text, tokenizer, tokens=tokens, seqlen=seqlen)
    refuse_overlap(model, held_out)
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": place}
    # The reference is the source with its own table, not with one that was split off it and rounded.
    original = BlockModel(source, ple=None if holds_table(source) else ple, **options)
    changed = BlockModel(model, ple=ple, **options)
    _require_same_shape(original, changed)
    with ExitStack() as stack:
        job = None
        if report is not None:
            identity = _identity(original, changed, held_out, dtype, place)
            inputs = (model, source, ple)
            job = stack.enter_context(
                Job(
                    report,
                    "quality",
                    identity,
                    inputs=inputs,
                    below_input=True,
                    fresh=fresh,
                    progress=progress,
                )
            )
            if job.up_to_date:
                progress.say(f"{report} is up to date")
                stored = read_part(read_json(report / REPORT))
                return with_limits(stored, max_kl=max_kl, min_top1=min_top1)
        need, batch_size = _plan(original, changed, held_out, memory, on_disk=job is not None)
        if job is not None:
            require_free_space(job.out, 2 * need.streams)  # of a block and of the next
        _state(need, held_out, progress)
        part = _measure(original, changed, held_out, tokenizer, batch_size, need, job, progress)
        part.data |= {"dtype": dtype, "device": place}
        if job is not None:
            from q38.measure.quality_report import write_report

            job.commit("report", files=write_report(job.out, part.to_dict(), names=(str(model), str(source))))
            job.finish({"positions": part.data["positions"]})
    return with_limits(part, max_kl=max_kl, min_top1=min_top1)


def resolve_device(name: str) -> str:
    """ "auto" as "cuda" or "cpu"; others as they are.

    Raises:
        InputError: no name of a device. ResourceError: this machine has no such GPU.
    """
    if name == "cpu":
        return name
    found = re.fullmatch(r"auto|cuda(?::(\d+))?", name)
    if found is None:
        raise InputError(f"'{name}' is no device", where="--device", remedy="write auto, cpu, cuda or cuda:1")
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return "cuda" if count else "cpu"
    if int(found[1] or 0) >= count:
        raise ResourceError(
            f"GPU {found[1] or 0} is not there, this machine has {count} for torch",
            where="--device",
            remedy="write auto or cpu, or see what q38 doctor says of the GPU and torch",
        )
    return name


def held_out_tokens(text: str, tokenizer: Any, *, tokens: int, seqlen: int) -> HeldOut:
    """Sequences of held-out text, equal shares of each language."""
    texts = load_texts(text, "held_out")
    packed = pack_tokens(
        texts.texts,
        tokenizer,
        length=seqlen,
        count=max(tokens // seqlen, 1),
        where=text,
        languages=texts.languages,
    )
    hashes = [text_hash(texts.texts[i]) for i in packed.used]
    return HeldOut(packed.ids, packed.languages, texts, text, hashes)


def refuse_overlap(model: Path, held_out: HeldOut) -> None:
    """Refuse to measure a model on text that its manifest says it was calibrated on.

    Raises:
        InputError: how many texts are in both.
    """
    seen = set(calibrated_on(model) or ())
    both = seen.intersection(held_out.hashes)
    if both:
        raise InputError(
            f"{len(both)} of {len(held_out.hashes)} texts are among those that the model was calibrated on",
            where=held_out.source,
            remedy="give other text, or quantize with text whose held-out part this is",
        )


def calibrated_on(model: Path) -> list[str] | None:
    """Hashes of the texts a model was calibrated on (`q38.model.text.text_hash`); None where its manifest has none."""
    result = (read_manifest(model) or {}).get("result") or {}
    hashes = (result.get("calibration") or {}).get("text_hashes")
    return None if hashes is None else [str(digest) for digest in hashes]


def _measure(
    source: BlockModel,
    model: BlockModel,
    held_out: HeldOut,
    tokenizer: Any,
    batch_size: int,
    need: Need,
    job: Job | None,
    progress: Progress,
) -> Part:
    import torch

    from q38.measure.classes import token_classes
    from q38.measure.quality import compare, quality_part
    from q38.measure.streamed import streamed

    ids, start, before = held_out.ids, time.monotonic(), resident_memory()
    reset_peak()
    if need.on_device:
        torch.cuda.reset_peak_memory_stats(source.device)
    with streamed(source, model, ids, batch_size=batch_size, job=job, progress=progress) as outcome:
        floor, ours = compare(outcome.source, (outcome.floor, outcome.model), ids, progress=progress)
    labels = {
        "language": np.repeat(np.array(held_out.languages), ids.shape[1] - 1),
        "token class": token_classes(ids[:, 1:], tokenizer),
    }
    part = quality_part(ours, floor, floor_kind=outcome.floor_kind, layers=outcome.layers, labels=labels)
    seconds = time.monotonic() - start
    part.data |= {
        "text": {
            "source": held_out.source,
            "origin": held_out.texts.origin,
            "split": "held_out",
            "sha256": held_out.texts.sha256,
            "overlap_checked": calibrated_on(model.checkpoint.path) is not None,
        },
        "seqlen": ids.shape[1],
        "batch_size": batch_size,
        "seconds": round(seconds, 3),
        "memory": {
            **need.to_dict(),
            "before": before,
            "stated": before + need.host,
            "peak": peak_memory(),
            "device_peak": torch.cuda.max_memory_allocated(source.device) if need.on_device else 0,
        },
    }
    return part


def _plan(
    source: BlockModel, model: BlockModel, held_out: HeldOut, memory: int | None, *, on_disk: bool
) -> tuple[Need, int]:
    """What it takes, and how many sequences go through a block at a time; refused where it does not fit."""
    from q38.measure.needs import memory_need, require_memory

    sequences, tokens = held_out.ids.shape
    batch = _BATCH_CPU if source.device.type == "cpu" else _BATCH_GPU
    batch_size = min(max(batch // tokens, 1), sequences)
    need = memory_need(source, model, sequences, tokens, batch_size, on_disk=on_disk)
    require_memory(need, source.device, memory)
    return need, batch_size


def _state(need: Need, held_out: HeldOut, progress: Progress) -> None:
    sequences, tokens = held_out.ids.shape
    where = "on disk" if need.on_disk else "in memory"
    device = f", {format_bytes(need.device)} of the GPU" if need.on_device else ""
    progress.say(
        f"quality: {sequences} sequences of {tokens} tokens ({held_out.texts.origin}); residual streams of"
        f" {format_bytes(need.streams)} {where}, {format_bytes(need.block)} for a block:"
        f" {format_bytes(need.host)} of host memory{device} at most"
    )


def _require_same_shape(source: BlockModel, model: BlockModel) -> None:
    for name in _SHAPE:
        ours, theirs = getattr(model.shape, name), getattr(source.shape, name)
        if ours != theirs:
            raise InputError(
                f"{name} differs from the source's",
                where=model.checkpoint.path,
                remedy="give the checkpoint that this model was made from",
            )


def _identity(
    source: BlockModel, model: BlockModel, held_out: HeldOut, dtype: str, device: str
) -> dict[str, Any]:
    return {
        "source": source.checkpoint.fingerprint,
        "model": model.checkpoint.fingerprint,
        "tokens": held_out.sha256,
        "dtype": dtype,
        "device": device,
    }
