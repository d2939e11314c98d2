"""What a format of the KV cache costs: log-probabilities of a long text with it, against those with a bf16 cache.

A server of each format scores the same text. Only positions after the first prefill step count: on a GPU that step
attends to its fresh keys and values and reads no cache. Two more runs say what the difference means: the bf16 server
a second time (the noise), and a cache of zeros (the control), without whose effect the text would not read the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

import q38
from q38.base.errors import CheckFailed, InputError
from q38.base.files import has_schema, holds
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import Checkpoint, read_json
from q38.checkpoint.writer import atomic_file, write_json
from q38.measure.files import require_writable
from q38.measure.identity import model_identity
from q38.measure.oracle_needles import DEPTHS, Needle, Ranker, look_up, make_needles, plot_needles, summarize
from q38.measure.oracle_prompts import Item
from q38.measure.prompts import load_prompt_text
from q38.measure.stats import Floats, clustered_mean
from q38.model.kv import RING_SLOTS, kv_bytes_per_token
from q38.model.shape import ModelShape

SCHEMA = "q38.oracle-kv/2"
REFERENCE, CONTROL = "bf16", "zeros"
FORMATS = ("int8", "int8ring_int4", "int4")
_BLOCK = 128  # neighbouring positions, correlated: one cluster of the standard errors
_BINS = 16  # points of the plot
_QUESTION = 32  # the most tokens of a needle's question, and of its answer
_MOVED = 0.01  # nats: below this the control says that the text does not read the cache


class Scorer(Ranker, Protocol):
    """Scores a continuation; see q38.measure.oracle_engine.Engine."""

    def score(self, items: Sequence[Item], *, progress: Progress = SILENT) -> list[list[float]]:
        """Natural-log probability of each continuation token."""


# (format, whether zeros are written instead) -> a server that scores
Servers = Callable[[str, bool], AbstractContextManager[Scorer]]


@dataclass(frozen=True)
class KvOptions:
    """What is measured.

    formats: the formats to compare with bf16.
    tokens: of the text. chunk: prefill step; positions before it do not count.
    ring: newest tokens that int8ring_int4 keeps in INT8.
    text: a text file; default: the passages that ship with q38.
    device: "cuda" or "cpu"; default: cuda.
    needles: lengths of texts with a hidden fact; default: a quarter, half and all of `tokens`. None of them: ().
    depths: of the fact in them.
    """

    formats: tuple[str, ...] = FORMATS
    tokens: int = 8192
    chunk: int = 512
    ring: int = RING_SLOTS
    text: Path | None = None
    device: str | None = None
    needles: tuple[int, ...] | None = None
    depths: tuple[float, ...] = DEPTHS

    @property
    def lengths(self) -> tuple[int, ...]:
        """Lengths of the needles."""
        if self.needles is not None:
            return self.needles
        shorter = (self.tokens // 4, self.tokens // 2, self.tokens)
        return tuple(n for n in shorter if n >= self.chunk + _QUESTION)


def measure(
    model: Path,
    out: Path,
    *,
    ple: Path | None = None,
    options: KvOptions | None = None,
    fresh: bool = False,
    servers: Servers | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Score the text with every format, write `out` (JSON) and the plot beside it (SVG).

    Returns:
        {"schema", "formats": {name: {"nll", "d_nll", "mean_abs", "max_abs", "bytes_per_token", "by_position"}},
        "noise", "control", "order", "needles": q38.measure.oracle_needles.summarize or None, ...}; differences in nats, format
        minus bf16.

    Raises:
        InputError: unknown format, a text that is too short, or `out` is of other inputs.
        CheckFailed: a cache of zeros scores like the real one.
    """
    options = options or KvOptions()
    ids, needles, inputs = _inputs(model, options)
    if (existing := _find(out, inputs, fresh=fresh)) is not None:
        progress.say(f"{out} is up to date")
        return existing
    require_writable(out)
    item = Item("text", tuple(ids[: options.chunk]), tuple(ids[options.chunk :]))
    start = servers or real_servers(model, ple, options, progress)
    with start(REFERENCE, False) as scorer:
        reference, again = (_score(scorer, item, progress) for _ in range(2))
        blank, found = look_up(scorer, needles, without=True), {REFERENCE: look_up(scorer, needles)}
    runs: dict[str, Floats] = {}
    for name in options.formats:
        with start(name, False) as scorer:
            runs[name], found[name] = _score(scorer, item, progress), look_up(scorer, needles)
    with start(options.formats[0], True) as scorer:
        zeros, found[CONTROL] = _score(scorer, item, progress), look_up(scorer, needles)
    document = _document(model, options, inputs, reference, again, zeros, runs)
    document["needles"] = summarize(needles, blank, found) if needles else None
    if document["control"]["mean_abs"] < max(_MOVED, 10 * document["noise"]["mean_abs"]):
        raise CheckFailed(
            f"a cache of zeros moves the log-probabilities by {document['control']['mean_abs']:.4f} nats, noise {document['noise']['mean_abs']:.4f}",
            where="q38 oracle kv",
            remedy="give a text that is longer, or a model that attends to what it has read",
        )
    plots = {".svg": _plot(document)}
    if needles:
        plots[".needles.svg"] = plot_needles(document["needles"])
    for suffix, plot in plots.items():
        with atomic_file(out.with_suffix(suffix)) as file:
            file.write(plot.encode())
    write_json(out, document)
    return document


def plan(model: Path, out: Path, *, options: KvOptions | None = None, fresh: bool = False) -> dict[str, Any]:
    """What `measure` would do, with the same refusals. Starts and writes nothing."""
    options = options or KvOptions()
    _, needles, inputs = _inputs(model, options)
    existing = _find(out, inputs, fresh=fresh)
    return {
        "dry_run": True,
        "up_to_date": existing is not None,
        "servers": 0 if existing else len(options.formats) + 2,
        "tokens": options.tokens,
        "positions": options.tokens - options.chunk,
        "needles": len(needles),
        "writes": [
            str(out),
            *(str(out.with_suffix(s)) for s in (".svg", ".needles.svg")[: 2 if needles else 1]),
        ],
    }


def _inputs(model: Path, options: KvOptions) -> tuple[list[int], list[Needle], dict[str, Any]]:
    """Token ids of the text, the needles in it, and all that the result depends on."""
    from q38.hf.load import load_tokenizer

    unknown = [name for name in options.formats if name not in (*FORMATS, "fp8")]
    if unknown or not options.formats:
        raise InputError(
            f"no format '{', '.join(unknown)}' to compare with {REFERENCE}",
            where="--formats",
            remedy=f"known: {', '.join((*FORMATS, 'fp8'))}",
        )
    if options.tokens <= options.chunk:
        raise InputError(
            f"{options.tokens} tokens, of which the first {options.chunk} read no cache",
            where="--tokens",
            remedy="give more tokens than --chunk",
        )
    tokenizer = load_tokenizer(model)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    ids = encode("\n\n".join(load_prompt_text(options.text).passages))
    if len(ids) < options.tokens:
        raise InputError(
            f"the text has {len(ids)} tokens, not {options.tokens}",
            where=options.text or "--tokens",
            remedy="give a longer --text, or fewer --tokens",
        )
    ids = ids[: options.tokens]
    if any(not options.chunk + _QUESTION <= n <= options.tokens for n in options.lengths):
        raise InputError(
            f"texts of {', '.join(map(str, options.lengths))} tokens",
            where="--needles",
            remedy=f"give lengths from {options.chunk + _QUESTION} (--chunk and the question) to {options.tokens} (--tokens)",
        )
    if any(not 0 <= depth <= 1 for depth in options.depths):
        raise InputError("a depth is a part of the text, 0 to 1", where="--depths")
    needles = make_needles(ids, encode, options.lengths, options.depths)
    inputs = {
        "model": model_identity(model),
        "text": hashlib.sha256(np.array(ids, np.int64).tobytes()).hexdigest(),
        "tokens": options.tokens,
        "chunk": options.chunk,
        "ring": options.ring,
        "formats": list(options.formats),
        "device": options.device or "cuda",
        "needles": list(options.lengths),
        "depths": list(options.depths),
    }
    return ids, needles, inputs


def _find(out: Path, inputs: dict[str, Any], *, fresh: bool) -> dict[str, Any] | None:
    if not holds(out, f"{SCHEMA} file", has_schema(SCHEMA)) or fresh:
        return None
    saved: dict[str, Any] = read_json(out)
    changed = [key for key, value in inputs.items() if saved.get("inputs", {}).get(key) != value]
    if changed:
        raise InputError(
            f"was made with other inputs ({', '.join(changed)})",
            where=out,
            remedy="choose another file, or replace it with --fresh",
        )
    return saved


def real_servers(model: Path, ple: Path | None, options: KvOptions, progress: Progress = SILENT) -> Servers:
    """SGLang servers of the model, one a call."""
    from q38.measure.oracle_sglang import SglangEngine
    from q38.serving.launch import running_server
    from q38.serving.sglang_settings import SglangSettings

    @contextmanager
    def start(name: str, zeroed: bool) -> Iterator[Scorer]:
        settings = SglangSettings(
            device=options.device,
            context=-(-(options.tokens + _QUESTION + 2) // 64) * 64,
            chunk=options.chunk,
            kv=name,
            kv_ring=options.ring,
            kv_zeroed=zeroed or None,
        )
        progress.say(f"KV cache of {CONTROL if zeroed else name}")
        with (
            running_server(model, ple=ple, engine="sglang", sglang=settings, progress=progress) as server,
            SglangEngine(server.url, model) as engine,
        ):
            yield engine

    return start


def _score(scorer: Scorer, item: Item, progress: Progress) -> Floats:
    (found,) = scorer.score([item], progress=progress)
    return np.asarray(found, np.float64)


def _document(
    model: Path,
    options: KvOptions,
    inputs: dict[str, Any],
    reference: Floats,
    again: Floats,
    zeros: Floats,
    runs: dict[str, Floats],
) -> dict[str, Any]:
    shape = ModelShape.from_config(Checkpoint.open(model).config)
    formats = {
        name: {
            "bytes_per_token": kv_bytes_per_token(shape, name, context=options.tokens, ring=options.ring),
            **_difference(reference, run),
        }
        for name, run in runs.items()
    }
    return {
        "schema": SCHEMA,
        "q38": q38.__version__,
        "inputs": inputs,
        "positions": int(reference.size),
        "reference": {"format": REFERENCE, "nll": float(-reference.mean())},
        "noise": _difference(reference, again),
        "control": _difference(reference, zeros),
        "formats": formats,
        "order": sorted(formats, key=lambda name: formats[name]["mean_abs"]),
    }


def _difference(reference: Floats, run: Floats) -> dict[str, Any]:
    if not np.isfinite(run).all():
        raise CheckFailed("a log-probability is not finite", where="q38 oracle kv")
    difference = run - reference
    blocks = np.arange(difference.size) // _BLOCK
    moved, size = clustered_mean(-difference, blocks), clustered_mean(np.abs(difference), blocks)
    bins = np.array_split(np.abs(difference), min(_BINS, difference.size))
    return {
        "nll": float(-run.mean()),
        "d_nll": moved.value,
        "d_nll_standard_error": moved.standard_error,
        "mean_abs": size.value,
        "mean_abs_standard_error": size.standard_error,
        "max_abs": float(np.abs(difference).max()),
        "by_position": [float(part.mean()) for part in bins],
    }


def _plot(document: dict[str, Any]) -> str:
    """Mean |d log-probability| along the text, a line a format, noise and control with them."""
    from q38.measure.figures import COLOURS, MARKERS, drawing, standalone

    first, last = document["inputs"]["chunk"], document["inputs"]["tokens"]
    lines = {**document["formats"], f"{CONTROL} (control)": document["control"]}
    if document["noise"]["mean_abs"] > 0:
        lines[f"{REFERENCE} again (noise)"] = document["noise"]
    with drawing() as plot:
        axes = plot.axes
        for (name, row), colour, marker in zip(lines.items(), COLOURS, MARKERS, strict=False):
            values = row["by_position"]
            at = first + (np.arange(len(values)) + 0.5) * (last - first) / len(values)
            axes.plot(at, values, marker=marker, ms=4, color=colour, lw=1.4, label=name)
        axes.set_yscale("log")
        axes.set_xlabel("position in the text, tokens")
        axes.set_ylabel("mean |d log-probability|, nats")
        axes.legend(loc="best")
    return standalone(plot.svg)
