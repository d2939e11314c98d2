"""Routing profiles of routing that was recorded elsewhere: files, or a running server's answers."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

import q38
from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress, Task
from q38.checkpoint.index import Checkpoint, fingerprint_file
from q38.measure.files import require_writable
from q38.measure.identity import digest, model_identity
from q38.measure.placement import SPLIT, is_up_to_date, report
from q38.model.shape import ModelShape
from q38.model.text import STDLIB, load_texts, pack_tokens
from q38.residency.imported import DUMPS, Imported, Sizes, import_files, of_trace
from q38.residency.profile import Profile, merge, require_tokens, save
from q38.residency.trace import Trace, refuse_other, write_trace
from q38.serving.client import Client, ServerError

FLAG = "--enable-return-routed-experts"
COUNTS = "/q38/routing"


def import_placement(
    model: Path,
    out: Path,
    files: Sequence[Path],
    *,
    weights: Sequence[float] | None = None,
    smoothing: bool = True,
    sizes: Sequence[int] | None = None,
    fresh: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Make a profile of traces, dumps and profiles, one or several (q38.residency.imported).

    Args:
        model: whose config.json the files must agree with.
        weights: share of each file's workload; default by tokens.
        smoothing: draw the counts of each of several files toward the others' (q38.residency.smoothing).
        dry_run: read and check the files, write nothing, and return what `plan_placement` would.

    Returns:
        As `build_placement`; where a file no longer tells the halves of its tokens apart, the coverage is of
        the profile itself, and `equal` and `budgets` are None.

    Raises:
        InputError: a file of another model or of another kind, too few tokens, or `out` holds something else.
    """
    metadata = _metadata(
        model,
        files=digest([_content(file) for file in files]),
        weights=",".join(map(str, weights)) if weights else "by tokens",
        **({"smoothing": "toward the other files"} if smoothing and len(files) > 1 else {}),
    )
    found = model_sizes(model)
    up_to_date = is_up_to_date(out, metadata, fresh=fresh, halves=False)
    if dry_run:
        imported = import_files(files, found, weights=weights, smoothing=smoothing).whole
        require_tokens(imported.tokens, where="--from")
        return _plan(out, found, imported.tokens, metadata, up_to_date=up_to_date)
    if not up_to_date:
        require_writable(out)
        _write(import_files(files, found, weights=weights, smoothing=smoothing), metadata, out)
    return report(out, model, sizes, up_to_date=up_to_date)


def record_server(
    model: Path,
    out: Path,
    url: str,
    *,
    text: str = STDLIB,
    tokens: int = 4096,
    seqlen: int = 128,
    sizes: Sequence[int] | None = None,
    trace: Path | None = None,
    fresh: bool = False,
    dry_run: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Make a profile of what a running SGLang server's routers choose while it generates.

    Each request is a prompt of `seqlen` tokens and asks for as many greedy tokens. A server of `q38 serve` counts by
    itself, prompts and answers alike; nobody else may ask it meanwhile. Any other must return the experts of each token;
    then only the choices for generated tokens count, since decoding is what the placement is for.

    Args:
        model: the checkpoint that the server serves; its tokenizer makes the prompts.
        url: the server's root: of `q38 serve`, or of SGLang with --enable-return-routed-experts.
        tokens: generated tokens to record, at least.
        trace: also write the raw choices to this file; counts are not enough for that.
        dry_run: ask the server for its name only, and return what `plan_placement` would.

    Raises:
        InputError: too few tokens, the server returns no routed experts or those of another model, or `trace` holds something else.
        ResourceError: no server answers. ServerError: it refuses, breaks off or sends garbage.
    """
    require_tokens(tokens, where="--tokens")
    if trace is not None:
        refuse_other(trace)
    if seqlen < 2:
        raise InputError(f"{seqlen} tokens a prompt", where="--seqlen", remedy="give at least 2")
    found = model_sizes(model)
    texts = load_texts(text, SPLIT)
    requests = -(-tokens // (seqlen - 1))
    server = _Completions(url)
    with server:
        served = str(server.models()[0]["id"])
        counts = trace is None and server.counts_experts()
        requests += requests % 2 if counts else 0  # for two halves
        metadata = _metadata(
            model, served=served, text=text if text == STDLIB else Path(text).name, text_sha256=texts.sha256,
            split=SPLIT, seqlen=str(seqlen), requests=str(requests), **({"recorded": "counts"} if counts else {}),
        )  # fmt: skip
        up_to_date = is_up_to_date(out, metadata, fresh=fresh) and (trace is None or trace.exists())
        if dry_run:
            return _plan(out, found, requests * (seqlen - 1), metadata, up_to_date=up_to_date)
        if not up_to_date:
            for file in (out, trace) if trace else (out,):
                require_writable(file)
            from q38.hf.load import load_tokenizer

            prompts = pack_tokens(
                texts.texts, load_tokenizer(model), length=seqlen, count=requests, where=text
            )
            ids = prompts.ids.tolist()
            with progress.task("record", requests * (seqlen - 1), "tokens") as task:
                if counts:
                    halves = [_count(server, served, part, found, task) for part in _halves(ids)]
                    _write(Imported(merge(halves), (halves[0], halves[1])), metadata, out)
                else:
                    steps = []
                    for prompt in ids:
                        steps.append(server.choices(served, prompt, seqlen, found))
                        task.advance(len(steps[-1]))
                    recorded = Trace(np.concatenate(steps), None, found.experts)
                    _write(of_trace(recorded), metadata, out)
                    if trace is not None:
                        write_trace(trace, recorded)
    return report(out, model, sizes, up_to_date=up_to_date)


def _halves(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    middle = len(prompts) // 2
    return prompts[:middle], prompts[middle:]


def _count(server: _Completions, served: str, prompts: list[list[int]], sizes: Sizes, task: Task) -> Profile:
    """What the server counts while it answers these prompts with as many tokens each."""
    before = server.counted(sizes)
    for prompt in prompts:
        server.generate(served, prompt, len(prompt))
        task.advance(len(prompt) - 1)
    count = server.counted(sizes) - before
    return Profile(count, count / sizes.top_k, int(count.sum()) // (sizes.layers * sizes.top_k))


def count_server(
    model: Path,
    out: Path,
    url: str,
    *,
    sizes: Sequence[int] | None = None,
    fresh: bool = False,
    dry_run: bool = False,
) -> dict[str, Any]:
    """Make a profile of what a server that q38 started has chosen since its start, prompts and answers alike.

    Gate weights are not counted there: every selection weighs the same.

    Raises:
        InputError: too few tokens so far, a server of another kind or of another model, or `out` holds something else.
        ResourceError: no server answers. ServerError: it refuses, breaks off or sends garbage.
    """
    found = model_sizes(model)
    server = _Completions(url)
    with server:
        served, count = str(server.models()[0]["id"]), server.counted(found)
    tokens = int(count.sum()) // (found.layers * found.top_k)
    require_tokens(tokens, where=url)
    metadata = _metadata(model, served=served, counted=digest(count.tolist()))
    up_to_date = is_up_to_date(out, metadata, fresh=fresh, halves=False)
    if dry_run:
        return _plan(out, found, tokens, metadata, up_to_date=up_to_date)
    if not up_to_date:
        require_writable(out)
        save(Profile(count, count / found.top_k, tokens, metadata), out)
    return report(out, model, sizes, up_to_date=up_to_date)


def model_sizes(model: Path) -> Sizes:
    """Layers, experts and experts a token of a checkpoint."""
    shape = ModelShape.from_config(Checkpoint.open(model).config)
    return Sizes(shape.num_layers, shape.num_experts, shape.num_experts_per_tok)


class _Completions(Client):
    """The completions endpoint of SGLang, with its extension that returns the experts of each token."""

    def counts_experts(self) -> bool:
        """Whether it is a server of q38, which counts by itself."""
        with self._errors(COUNTS):
            return self._http.get(COUNTS).status_code != httpx.codes.NOT_FOUND

    def counted(self, sizes: Sizes) -> NDArray[np.int64]:
        """[L, E]: how often each expert was chosen since the server's start (q38.sglang_ext.routes)."""
        with self._errors(COUNTS) as where:
            response = self._http.get(COUNTS)
            if response.status_code == httpx.codes.NOT_FOUND:
                raise InputError(
                    "the server does not count its experts", where=where, remedy="start it with q38 serve"
                )
            result = _document(response, where).get("result")
        try:
            count = np.array(result["selections"] if isinstance(result, dict) else None, dtype=np.int64)
        except (KeyError, TypeError, ValueError):
            raise ServerError("the answer holds no counts", where=where) from None
        if count.shape != (sizes.layers, sizes.experts) or count.min(initial=0) < 0:
            raise InputError(
                f"counts of {count.shape}, the model has {sizes.layers} x {sizes.experts} experts",
                where=where,
                remedy="give the checkpoint that the server serves",
            )
        return count

    def choices(self, served: str, prompt: list[int], generate: int, sizes: Sizes) -> NDArray[np.int64]:
        """Experts [steps, L, K] of the generated tokens that went through the model again."""
        answer, where = self.generate(
            served, prompt, generate, return_routed_experts=True, routed_experts_start_len=len(prompt)
        )
        extension = answer.get("sglext")
        encoded = extension.get("routed_experts") if isinstance(extension, dict) else None
        if not isinstance(encoded, str) or not encoded:
            raise InputError(
                "the server returns no routed experts",
                where=where,
                remedy=f"start it with q38 serve, or SGLang with {FLAG}; other servers cannot",
            )
        return _decode(encoded, sizes, where)

    def generate(
        self, served: str, prompt: list[int], tokens: int, **more: Any
    ) -> tuple[dict[str, Any], str]:
        """Answer a prompt with so many greedy tokens. Returns the document and the address."""
        body = {
            "model": served, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more,
        }  # fmt: skip
        with self._errors("/v1/completions") as where:
            return _document(self._http.post("/v1/completions", json=body), where), where


def _document(response: httpx.Response, where: str) -> dict[str, Any]:
    if response.status_code != httpx.codes.OK:
        text = " ".join(response.text.split())[:200]
        raise ServerError(f"HTTP {response.status_code}: {text}", where=where, status=response.status_code)
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not isinstance(answer, dict):
        raise ServerError("the answer is no JSON object", where=where)
    return answer


def _decode(encoded: str, sizes: Sizes, where: str) -> NDArray[np.int64]:
    """base64 of int32 [tokens, L, K], as SGLang 0.5.23 sends it."""
    try:
        flat = np.frombuffer(base64.b64decode(encoded, validate=True), dtype="<i4")
    except (binascii.Error, ValueError):
        raise ServerError("routed experts are not base64 of 32-bit integers", where=where) from None
    step = sizes.layers * sizes.top_k
    if flat.size == 0 or flat.size % step or flat.min() < 0 or flat.max() >= sizes.experts:
        raise InputError(
            f"{flat.size} routed experts from {flat.min(initial=0)} to {flat.max(initial=0)} do not fit {sizes.layers} layers "
            f"of {sizes.experts} experts, {sizes.top_k} a token",
            where=where,
            remedy="give the checkpoint that the server serves",
        )
    return flat.reshape(-1, sizes.layers, sizes.top_k).astype(np.int64)


def _write(found: Imported, metadata: dict[str, str], out: Path) -> None:
    save(replace(found.whole, metadata=metadata), out, halves=found.halves)


def _plan(
    out: Path, sizes: Sizes, tokens: int, metadata: dict[str, str], *, up_to_date: bool
) -> dict[str, Any]:
    return {
        "dry_run": True,
        "up_to_date": up_to_date,
        "tokens": tokens,
        "writes": str(out),
        "bytes": 2 * sizes.layers * sizes.experts * (8 + 4),
        "metadata": metadata,
    }


def _metadata(model: Path, **more: str) -> dict[str, str]:
    identity = model_identity(model)
    return {
        "model_source": identity["source"],
        "model_weights": identity["weights"],
        "q38": q38.__version__,
        **more,
    }


def _content(file: Path) -> list[str]:
    return [fingerprint_file(part) for part in _parts(file)]


def _parts(file: Path) -> Iterator[Path]:
    if not file.exists():
        raise InputError("no such file", where=file, remedy="give a recorded trace, dump or profile")
    yield from sorted(file.glob(DUMPS)) if file.is_dir() else (file,)
