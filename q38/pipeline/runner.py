"""Runs the steps of a prepared run in order, recording each."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from q38.base.progress import Progress
from q38.base.units import format_bytes, format_seconds
from q38.checkpoint.writer import write_json, writing
from q38.pipeline import child, server
from q38.pipeline.fingerprint import combine, fingerprint_outputs, tree_bytes
from q38.pipeline.setup import Setup
from q38.pipeline.state import Record, RunState, refuse_stale
from q38.pipeline.steps import SERVE, URL, Step


class Runner:
    """Holds a server between the step that starts it and the last one that talks to it. `ran` names the steps done now."""

    def __init__(self, setup: Setup, state: RunState, progress: Progress) -> None:
        self.setup, self.state, self.progress = setup, state, progress
        self.work = setup.work
        self.ran: list[str] = []
        self._server: server.Server | None = None
        self._serving = ""  # the step that started it

    def run(self) -> None:
        """Do every step that is not done.

        Raises:
            InputError: what an earlier step wrote has changed.
            StepFailed: a step did not end well.
        """
        steps = self.setup.steps
        try:
            for number, step in enumerate(steps, 1):
                record = self.state.steps.get(step.name)
                if record is not None and record.ok and not self.ran:
                    refuse_stale(record, self._identity(step), self.work)
                    continue
                self.ran.append(step.name)
                self.progress.say(f"[{number}/{len(steps)}] {child.command_line(step.args)}")
                self._do(step)
                if not any(later.server == self._serving for later in steps[number:]):
                    self._stop_server()
        finally:
            self._stop_server()

    def _do(self, step: Step) -> None:
        identity = self._identity(step)
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        if step.starts_server:
            outcome = self._serve(step)
        elif step.server:
            url = self._running_server(step.server).url
            outcome = child.run([url if arg == URL else arg for arg in step.args])
        else:
            outcome = child.run(step.args)
        with writing(self.work.root):
            self.work.result(step.name).parent.mkdir(exist_ok=True)
        write_json(self.work.result(step.name), outcome.document)
        record = Record(
            name=step.name,
            ok=outcome.exit_code == 0 and outcome.document is not None,
            command=child.command_line(step.args),
            identity=identity,
            started=started,
            seconds=round(outcome.seconds, 3),
            bytes_in=tree_bytes(step.reads),
            bytes_out=tree_bytes(step.writes),
            peak_memory=outcome.peak_memory,
            exit_code=outcome.exit_code,
            outputs=fingerprint_outputs(step.writes, self.work.root),
        )
        self.state.steps[step.name] = record
        self.state.save(self.work)
        if not record.ok:
            raise child.StepFailed(step.name, outcome)
        took, peak = format_seconds(outcome.seconds), format_bytes(outcome.peak_memory)
        self.progress.say(f"    {step.name}: {took}, peak memory {peak}")

    def _serve(self, step: Step) -> child.Outcome:
        """Start a server, which stays up; ask the one that the run ends with the recipe's question."""
        begun = time.monotonic()
        running = self._start(step)
        document = {**running.document, "ready_seconds": round(running.seconds, 3)}
        if step.name == SERVE:
            answer = document["chat"] = server.ask(running.url, self.setup.recipe.serve)
            self.progress.say(f"    {answer['question']}\n    {answer['answer']}")
        return child.Outcome(0, document, time.monotonic() - begun, running.memory.peak)

    def _running_server(self, name: str) -> server.Server:
        """The server of that step, started again where an earlier run was killed after it."""
        if self._server is not None and self._serving == name:
            return self._server
        step = next(step for step in self.setup.steps if step.name == name)
        self.progress.say(f"    {child.command_line(step.args)}")
        return self._start(step)

    def _start(self, step: Step) -> server.Server:
        self._stop_server()
        self._server, self._serving = server.start(step), step.name
        return self._server

    def _stop_server(self) -> None:
        if self._server is None:
            return
        running, self._server = self._server, None
        peak = running.stop()
        if (record := self.state.steps.get(self._serving)) is not None:
            record.peak_memory = max(record.peak_memory, peak)
            self.state.save(self.work)
        self.progress.say(f"    {self._serving}: stopped")

    def _identity(self, step: Step) -> dict[str, Any]:
        """What the result of a step depends on, whatever WORKDIR and the source directory are called."""
        recipe = self.setup.recipe.to_dict()
        return {
            "command": " ".join(self.setup.portable(arg) for arg in step.args),
            "recipe": {section: recipe[section] for section in step.sections},
            "inputs": {self.setup.portable(path): self._input(path) for path in step.reads},
        }

    def _input(self, path: Path) -> str:
        if path == self.setup.source:
            return combine(self.state.source)
        writer = next(step for step in self.setup.steps if path in step.writes)
        outputs = self.state.steps[writer.name].outputs
        prefix = str(path.relative_to(self.work.root))
        return combine({k: v for k, v in outputs.items() if k == prefix or k.startswith(prefix + "/")})
