"""`q38 bench serve`: measure a running server cell by cell, and compare it with a stored run or another server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

import q38
from q38.base.errors import Q38Error
from q38.base.progress import SILENT, Progress
from q38.measure.bench.compare import (
    GATE,
    SCHEMA,
    compare_results,
    compare_rivals,
    require_common,
    require_same,
)
from q38.measure.bench.counters import server_figures
from q38.measure.bench.plan import Cell, Plan, command_line
from q38.measure.bench.rounds import STEADY, Prompter, Series, play_group
from q38.measure.bench.summary import decode_rate, summarize
from q38.measure.bench.target import Target, describe_machine
from q38.measure.prompts import load_prompt_text
from q38.serving.client import Client

DEFAULT_URL = "http://127.0.0.1:30000"


class BenchFailed(Q38Error):
    """A request failed, so the run ended there. The exit code is that of the request's error.

    partial: the result so far, marked as incomplete.
    """

    def __init__(self, cell: str, error: Q38Error, partial: dict[str, Any]) -> None:
        done = sum(c["complete"] for c in partial["cells"])
        what = f"{cell}: {error.what}; {done} cell{'' if done == 1 else 's'} finished before it"
        super().__init__(what, where=error.where, remedy=error.remedy)
        self.exit_code = error.exit_code
        self.partial = partial

    def to_dict(self) -> dict[str, object]:
        """The refusal, with the partial result beside it."""
        return {**super().to_dict(), "partial": self.partial}


def bench_serve(
    url: str = DEFAULT_URL,
    plan: Plan | None = None,
    *,
    model: str | None = None,
    api_key: str | None = None,
    stall_s: float = 600.0,
    text: Path | None = None,
    against: str | dict[str, Any] | None = None,
    gate: float = GATE,
    allow_different: bool = False,
    save: Callable[[dict[str, Any]], None] | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Measure a running server.

    Args:
        stall_s: a silence longer than this is a failure.
        text: a UTF-8 file to make prompts of, in place of the shipped text.
        against: a stored result (compare.read_result), or the address of another server, which then takes turns with
            the first one, round by round.
        gate: ratios surely below it are a slowdown.
        allow_different: compare different models, settings or machines.
        save: gets the result after every cell, marked as incomplete until the last.

    Returns:
        the result, schema q38.bench/2 (docs/bench.md).

    Raises:
        InputError: a depth that the model does not have, or a comparison of different things.
        ResourceError: no server answers.
        BenchFailed: a request failed; nothing is averaged over failures.
    """
    plan = plan or Plan(depths=(128, 2048))
    source = load_prompt_text(text)
    with ExitStack() as stack:
        urls = [url] if not isinstance(against, str) else [url, against]
        clients = [stack.enter_context(Client(u, api_key=api_key, stall_s=stall_s)) for u in urls]
        targets = [Target.open(client, model if i == 0 else None) for i, client in enumerate(clients)]
        for target in targets:
            target.require_context(max(plan.depths) + plan.max_tokens)
        prompter = Prompter(source, plan.seed)
        options = [("--model", model), ("--text", text)]
        options += [("--against", against if isinstance(against, str) else None)]
        result: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": "MEASURED",
            "complete": False,
            "failed": None,
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command_line(url, plan, options),
            "q38": q38.__version__,
            "server": targets[0].describe(),
            "machine": None,
            "text": {"sha256": source.sha256, "chars_in_one_pass": source.chars},
            "settings": None,
            "cells": [],
        }
        result["machine"] = describe_machine(result["server"]["runs_here"])
        run = _Run(plan, targets, prompter, result, save, progress)
        run.calibrate()
        settings = {**vars(plan), "ignore_eos": all(t.ignores_eos for t in targets), "steady_within": STEADY}
        result["settings"] = {k: list(v) if isinstance(v, tuple) else v for k, v in settings.items()}
        changed = []
        if isinstance(against, dict):
            require_same(result, against, where="--against", allow=allow_different)
            require_common([cell for group in plan.groups() for cell in group], against)
        elif against is not None:
            result["rival"] = {"server": targets[1].describe(), "cells": []}
            other = {**result, "server": result["rival"]["server"]}
            changed = require_same(result, other, where="--against", allow=allow_different)
        run.measure()
    if isinstance(against, dict):
        result["comparison"] = compare_results(result, against, gate=gate, allow_different=allow_different)
    elif against is not None:
        result["comparison"] = compare_rivals(result, changed, gate=gate)
    result["complete"] = True
    if save:
        save(result)
    return result


class _Run:
    """The requests of one benchmark, filling `result` as they go."""

    def __init__(
        self,
        plan: Plan,
        targets: Sequence[Target],
        prompter: Prompter,
        result: dict[str, Any],
        save: Callable[[dict[str, Any]], None] | None,
        progress: Progress,
    ) -> None:
        self.plan, self.targets, self.prompter = plan, targets, prompter
        self.result, self.save, self.progress = result, save, progress

    def calibrate(self) -> None:
        """Learn the tokenizer and each server's request fields."""
        try:
            for target in self.targets:
                self.prompter.calibrate(target)
        except Q38Error as error:
            raise self._failed("calibration", error) from None

    def measure(self) -> None:
        """All cells in order.

        Raises:
            BenchFailed: a request failed; the cells until then are in `result`.
        """
        groups = list(self.plan.groups())
        with self.progress.task("bench", len(groups), "depths and concurrencies") as task:
            for group in groups:
                series = [Series(target) for target in self.targets]
                now = str(group[0])

                def note(what: str, group: tuple[Cell, ...] = group) -> None:
                    nonlocal now
                    now = f"{group[0]}, {what}"
                    task.note(now)

                try:
                    play_group(group, self.plan, self.prompter, series, note)
                except Q38Error as error:
                    self._keep(group, series, complete=False)
                    raise self._failed(now, error) from None
                self._keep(group, series, complete=True)
                task.advance(1)
                if self.save:
                    self.save(self.result)
        self.result["machine"]["load_after"] = round(psutil.getloadavg()[0], 2)

    def _keep(self, group: Sequence[Cell], series: Sequence[Series], *, complete: bool) -> None:
        places = [self.result["cells"], *([self.result["rival"]["cells"]] if len(series) > 1 else [])]
        for place, one in zip(places, series, strict=True):
            for cell in group:
                rounds = one.measured[cell.prefix]
                if rounds:
                    rate = decode_rate(rounds)
                    output = None if rate is None else rate * cell.concurrency
                    figures = server_figures(one.counted[cell.prefix], output)
                    place.append(summarize(cell, one, figures, complete=complete))

    def _failed(self, cell: str, error: Q38Error) -> BenchFailed:
        self.result["failed"] = {"cell": cell, **_refusal(error)}
        if self.save and self.result["cells"]:
            self.save(self.result)
        return BenchFailed(cell, error, self.result)


def _refusal(error: Q38Error) -> dict[str, Any]:
    return {"kind": type(error).__name__, "what": error.what, "where": error.where}
