"""Verify a server: its behaviour, what the model can do, and standard evaluations. One report, one verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import q38
from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import package_versions
from q38.measure.behaviour import needles, registry
from q38.measure.behaviour.run import run_behaviours
from q38.measure.behaviour.target import Target, connect
from q38.measure.checks import Check, Part
from q38.measure.evaluations import TOOL, evaluate, require_tool
from q38.serving import records
from q38.serving.client import Client
from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings

SCHEMA = "q38.verify-server/1"
TINY = 2**30  # bytes of tensors below which nobody expects a model to answer questions


@dataclass(frozen=True)
class ServerOptions:
    """How to reach the server, or to start it.

    model: its name there; default: the first that the server lists.
    context: tokens of prompt and answer; default: what the server says.
    answer_tokens: most tokens of an answer that a check reads.
    capability: judge what the model can do; default: unless the model is known to be tiny.
    engine, device, ple: of a server that is started here.
    """

    model: str | None = None
    api_key: str | None = None
    context: int | None = None
    answer_tokens: int = 256
    capability: bool | None = None
    stall_s: float = 600.0
    seed: int = 0
    engine: str = "auto"
    device: str | None = None
    ple: Path | None = None


@dataclass(frozen=True)
class Evaluations:
    """Tasks for the evaluation tool. `limit`: questions of each task; None: all."""

    tasks: Sequence[str] = field(default=())
    limit: int | None = None


def verify_server(
    server: str,
    *,
    options: ServerOptions | None = None,
    checks: registry.Options | None = None,
    evaluations: Evaluations | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Check the server at a URL, or start one on a model directory, check it and stop it.

    Returns:
        {"schema", "server", "passed", "parts": [...], ...}. "passed" needs one row that passed and none
        that failed; rows without a verdict (unsupported, not reported, recorded) count for neither.

    Raises:
        InputError: wrong options, no such directory. ResourceError: no server answers, or it cannot be
            started; the evaluation tool is not installed.
    """
    options, checks = options or ServerOptions(), checks or registry.Options()
    evaluations = evaluations or Evaluations()
    behaviours = registry.choose(checks)
    if options.answer_tokens < 1:
        raise InputError("an answer has at least one token", where="--answer-tokens", remedy="write 256")
    if evaluations.tasks:
        require_tool()
    with _reach(server, options, progress) as (url, directory, log):
        with Client(url, api_key=options.api_key, stall_s=options.stall_s) as client:
            target = connect(
                client,
                model=options.model,
                context=options.context,
                answer_tokens=options.answer_tokens,
                judged=_judged(options, directory),
                seed=options.seed,
            )
            needles.require_room(target, checks.needles)
            parts = run_behaviours(target, behaviours, progress=progress)
        if evaluations.tasks and not _gone(parts):
            parts.append(_evaluations(url, target.model, evaluations, options, progress))
    return _document(target, directory, log, parts)


def _evaluations(
    url: str, model: str, wanted: Evaluations, options: ServerOptions, progress: Progress
) -> Part:
    try:
        return evaluate(
            url, model, wanted.tasks, limit=wanted.limit, api_key=options.api_key, progress=progress
        )
    except CheckFailed as error:  # the other rows are worth keeping
        return Part("evaluations", [Check(TOOL, False, note=f"{error.what}; {error.remedy}")])


@contextmanager
def _reach(
    server: str, options: ServerOptions, progress: Progress
) -> Iterator[tuple[str, Path | None, Path | None]]:
    """(url, the model's directory where it is known, the log of a server that was started here)."""
    if server.startswith(("http://", "https://")):
        for option, value in (("--device", options.device), ("--ple", options.ple)):
            if value is not None:
                raise InputError(
                    "is for a server that is started here",
                    where=option,
                    remedy="give --server a model directory",
                )
        url = server.rstrip("/").removesuffix("/v1")
        own = next((record for record in records.running() if record.url == url), None)
        yield url, Path(own.directory) if own else None, None
        return
    directory = Path(server)
    if not directory.exists():
        raise InputError(
            "no such directory, and no http address",
            where=server,
            remedy="give a model directory or http://HOST:PORT",
        )
    with running_server(
        directory,
        ple=options.ple,
        engine=options.engine,
        api_key=options.api_key,
        sglang=SglangSettings(device=options.device),
        progress=progress,
    ) as running:
        yield running.url, directory, running.log


def _judged(options: ServerOptions, directory: Path | None) -> bool:
    if options.capability is not None:
        return options.capability
    if directory is None:
        return True
    return Checkpoint.open(directory).nbytes > TINY


def _gone(parts: Sequence[Part]) -> bool:
    return any(check.note.startswith("not run: ") for part in parts for check in part.checks)


def _document(
    target: Target, directory: Path | None, log: Path | None, parts: Sequence[Part]
) -> dict[str, Any]:
    verdicts = [check.passed for part in parts for check in part.checks]
    return {
        "schema": SCHEMA,
        "q38": q38.__version__,
        "versions": package_versions(),
        "server": {**target.describe(), "log": None if log is None else str(log)},
        "model": None if directory is None else str(directory),
        "capability_judged": target.judged,
        "text": {"sha256": target.text.sha256},
        "passed": True in verdicts and False not in verdicts,
        "failed": verdicts.count(False),
        "unjudged": verdicts.count(None),
        "parts": [part.to_dict() for part in parts],
    }
