"""Speed of a running OpenAI-compatible server: time to first token, prefill and decode tokens/s.

Definitions, per request, all from the client's monotonic clock and the server's own token counts:
    time to first token   from sending the request to the first piece of the answer that carries something
    prefill tokens/s      prompt tokens / time to first token (so queueing and the first sampling count too)
    decode tokens/s       (generated tokens - 1) / (time of the finish reason - time of the first piece)
    inter-token times     differences between consecutive pieces
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

import q38
from q38.base.errors import InputError, Q38Error
from q38.base.progress import SILENT, Progress
from q38.checkpoint.writer import writing
from q38.measure.prompts import PromptText, TokenEstimate, load_prompt_text
from q38.serving import machine, records
from q38.serving.client import Client, Reply, ServerError
from q38.serving.preflight import is_loopback

SCHEMA = "q38.bench/1"
DEFAULT_URL = "http://127.0.0.1:30000"
_PROBE_TOKENS = 192  # prompt length of the calibration
_REFUSED = (400, 422)
_T = TypeVar("_T")


class BenchFailed(Q38Error):
    """A request failed, so there is no result. The exit code is that of the request's error."""

    def __init__(self, cell: str, error: Q38Error) -> None:
        super().__init__(f"{cell}: {error.what}; no result is kept", where=error.where, remedy=error.remedy)
        self.exit_code = error.exit_code


@dataclass(frozen=True)
class Run:
    """One measured request. Times in seconds."""

    prompt_tokens: int
    completion_tokens: int
    first_token_s: float
    end_s: float
    intervals_s: tuple[float, ...]

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.prompt_tokens / self.first_token_s

    @property
    def decode_tokens_per_s(self) -> float:
        return (self.completion_tokens - 1) / (self.end_s - self.first_token_s)

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "first_token_s": self.first_token_s,
            "end_s": self.end_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "pieces": len(self.intervals_s) + 1,
        }


@dataclass
class Session:
    """The requests of one benchmark. Prompt lengths get closer to their targets with every answer."""

    client: Client
    model: str
    text: PromptText
    max_tokens: int
    seed: int
    ignore_eos: bool = True
    estimate: TokenEstimate = field(default_factory=TokenEstimate)

    def measure(
        self, tokens: int, *, passages: Sequence[str] | None = None, max_tokens: int | None = None
    ) -> Run:
        """One request with a prompt of about `tokens` tokens.

        Raises:
            ServerError: it failed, or lacks what a speed is made of.
        """
        # The request's number is part of the seed: no two requests have their passages in one order.
        seed = self.seed * 1_000_003 + len(self.estimate.samples)
        prompt = self.text.prompt(
            tokens, count=self.estimate, nonce=secrets.token_hex(8), seed=seed, passages=passages
        )
        reply = self._ask(prompt, max_tokens or self.max_tokens)
        run = as_run(reply, where=self.client.url)
        self.estimate.learn(prompt, run.prompt_tokens)
        return run

    def calibrate(self) -> None:
        """Learn the tokenizer's rates from text that is mostly ASCII and from text that is not."""
        plain = [p for p in self.text.passages if sum(c.isascii() for c in p) > 0.9 * len(p)]
        other = [p for p in self.text.passages if p not in plain]
        for passages in (plain, other):
            self.measure(_PROBE_TOKENS, passages=passages, max_tokens=2)

    def _ask(self, prompt: str, max_tokens: int) -> Reply:
        options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
        if not self.ignore_eos:
            return self.client.chat(prompt, model=self.model, **options)
        try:
            return self.client.chat(prompt, model=self.model, ignore_eos=True, **options)
        except ServerError as error:
            # Only the first request may learn that the server does not know the field.
            if error.status not in _REFUSED or self.estimate.samples:
                raise
        self.ignore_eos = False
        return self._ask(prompt, max_tokens)


def bench_serve(
    url: str = DEFAULT_URL,
    *,
    contexts: Sequence[int] = (128, 2048),
    max_tokens: int = 64,
    repeats: int = 3,
    model: str | None = None,
    api_key: str | None = None,
    seed: int = 0,
    stall_s: float = 600.0,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure a running server. Requests go one at a time; each context is warmed up by one request.

    Args:
        contexts: prompt lengths in tokens, chat template included. Met approximately; the exact lengths are in
            the result.
        max_tokens: tokens to generate per request, at least 2.
        repeats: measured requests per context.
        stall_s: a silence longer than this is a failure.

    Returns:
        the result, schema q38.bench/1 (docs/verbs/bench.md).

    Raises:
        InputError: bad arguments, or a context that the server's model does not have.
        ResourceError: no server answers.
        BenchFailed: a request failed; nothing is averaged over failures.
    """
    check_arguments(contexts, max_tokens, repeats)
    with Client(url, api_key=api_key, stall_s=stall_s) as client:
        entry = _model_entry(client, model)
        _check_context(entry, contexts, max_tokens)
        text = load_prompt_text()
        session = Session(client, entry["id"], text, max_tokens, seed)
        cells = []
        with progress.task("bench", 1 + len(contexts) * (repeats + 1), "requests") as task:
            task.note("calibration")
            _or_fail("calibration", session.calibrate)
            task.advance(1)
            for context in contexts:
                runs = []
                for i in range(repeats + 1):
                    name = f"context {context}, " + (f"repeat {i} of {repeats}" if i else "warm-up")
                    task.note(name)
                    run = _or_fail(name, partial(session.measure, context))
                    runs += [run] if i else []
                    task.advance(1)
                cells.append(summarize(context, runs))
    return {
        "schema": SCHEMA,
        "kind": "MEASURED",
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": _command(url, contexts, max_tokens, repeats, model, seed),
        "q38": q38.__version__,
        "server": _server(client.url, entry),
        "machine": _machine(client.url),
        "text": {"sha256": text.sha256, "chars_in_one_pass": text.chars},
        "settings": {
            "max_tokens": max_tokens,
            "repeats": repeats,
            "seed": seed,
            "ignore_eos": session.ignore_eos,
        },
        "contexts": cells,
    }


def check_arguments(contexts: Sequence[int], max_tokens: int, repeats: int) -> None:
    """Refuse what cannot be measured. Raises InputError."""
    if not contexts or min(contexts) < 1:
        raise InputError(
            "context lengths are positive numbers of tokens", where="--contexts", remedy="write 128,2048"
        )
    if max_tokens < 2:
        raise InputError(
            f"{max_tokens} generated tokens have no time between them",
            where="--max-tokens",
            remedy="use at least 2",
        )
    if repeats < 1:
        raise InputError(f"{repeats} repeats measure nothing", where="--repeats", remedy="use at least 1")


def as_run(reply: Reply, *, where: str) -> Run:
    """The figures of one answer.

    Raises:
        ServerError: no token counts, no visible piece, or fewer than two tokens.
    """
    if reply.prompt_tokens is None or reply.completion_tokens is None:
        raise ServerError("the server sends no token counts (usage)", where=where)
    if reply.first_token_s is None:
        raise ServerError(f"none of {reply.completion_tokens} tokens was visible", where=where)
    if reply.completion_tokens < 2 or reply.end_s <= reply.first_token_s:
        raise ServerError(
            f"the answer ended after {reply.completion_tokens} tokens ({reply.finish_reason}); "
            "decode speed needs at least 2 at different times",
            where=where,
        )
    times = [delta.at for delta in reply.deltas]
    intervals = tuple(b - a for a, b in pairwise(times))
    return Run(reply.prompt_tokens, reply.completion_tokens, reply.first_token_s, reply.end_s, intervals)


def summarize(context: int, runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the repeats of one context; inter-token times over all its tokens, in milliseconds."""
    intervals = [1000 * t for run in runs for t in run.intervals_s]
    tokens, pieces = sum(r.completion_tokens for r in runs), sum(len(r.intervals_s) + 1 for r in runs)
    return {
        "context": context,
        "prompt_tokens": statistics.median(r.prompt_tokens for r in runs),
        "first_token_s": statistics.median(r.first_token_s for r in runs),
        "prefill_tokens_per_s": statistics.median(r.prefill_tokens_per_s for r in runs),
        "decode_tokens_per_s": statistics.median(r.decode_tokens_per_s for r in runs),
        "inter_token_ms": {
            "median": float(np.median(intervals)) if intervals else None,
            "p95": float(np.percentile(intervals, 95)) if intervals else None,
        },
        # Above 1 the server bundles tokens, and an inter-token time is the time of a bundle.
        "tokens_per_piece": tokens / pieces,
        "runs": [run.to_dict() for run in runs],
    }


def check_writable(out: Path) -> None:
    """Refuse an output file that cannot be written, before minutes of measuring. Leaves nothing behind."""
    with writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        if not out.exists():
            out.touch()
            out.unlink()
        elif not os.access(out, os.W_OK):
            raise PermissionError(errno.EACCES, "Permission denied")


def _or_fail(cell: str, request: Callable[[], _T]) -> _T:
    try:
        return request()
    except Q38Error as error:
        raise BenchFailed(cell, error) from None


def _model_entry(client: Client, model: str | None) -> dict[str, Any]:
    entries = client.models()
    for entry in entries:
        if model in (None, entry["id"]):
            return entry
    names = ", ".join(str(e["id"]) for e in entries)
    raise InputError(
        f"the server has no model '{model}'", where="--model", remedy=f"it has: {names or 'none'}"
    )


def _check_context(entry: dict[str, Any], contexts: Sequence[int], max_tokens: int) -> None:
    limit = entry.get("max_model_len")
    if isinstance(limit, int) and max(contexts) + max_tokens > limit:
        raise InputError(
            f"{max(contexts)} + {max_tokens} tokens exceed the server's context of {limit}",
            where="--contexts",
            remedy=f"use at most {limit - max_tokens}",
        )


def _server(url: str, entry: dict[str, Any]) -> dict[str, Any]:
    """What answers at `url`; more where it is one of this user's own servers."""
    result: dict[str, Any] = {"url": url, "model": entry["id"], "owned_by": entry.get("owned_by")}
    result["max_model_len"] = entry.get("max_model_len")
    own = next((r for r in records.running() if r.url == url), None)
    if own is not None:
        result["engine"] = own.engine
        result["files"] = {
            name: hashlib.sha256((Path(own.directory) / name).read_bytes()).hexdigest()
            for name in ("config.json", "MANIFEST.json")
            if (Path(own.directory) / name).is_file()
        }
    return result


def _machine(url: str) -> dict[str, Any]:
    """This machine, without paths. `runs_the_server` is false when the server is elsewhere."""
    document = machine.probe().to_dict()
    del document["disk"]
    return {"runs_the_server": is_loopback(urlsplit(url).hostname or ""), **document}


def _command(
    url: str, contexts: Sequence[int], max_tokens: int, repeats: int, model: str | None, seed: int
) -> str:
    parts = ["q38 bench serve", f"--url {url}", f"--contexts {','.join(map(str, contexts))}"]
    parts += [f"--max-tokens {max_tokens}", f"--repeats {repeats}", f"--seed {seed}"]
    return " ".join(parts + ([f"--model {model}"] if model else []))
