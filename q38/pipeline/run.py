"""`q38 run`: every step from one recipe, each a child process, resumable at any moment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import atomic_file
from q38.pipeline.child import MemorySampler, StepFailed, command_line
from q38.pipeline.preflight import find_lacks, require_machine
from q38.pipeline.runner import Runner
from q38.pipeline.setup import Setup, prepare
from q38.pipeline.state import RunState, first_touched, lock, refuse_changes
from q38.pipeline.steps import left_out


def run(
    recipe: str | Path,
    workdir: Path,
    *,
    source: Path | None = None,
    fresh: bool = False,
    fresh_from: str | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Do every step of `recipe` in `workdir` that is not done yet, then write report.html and report.json.

    Args:
        recipe: a recipe file, or the name of a shipped one.
        workdir: directory of the run; its run.json remembers what is done.
        source: checkpoint directory, instead of the recipe's source.
        fresh: remove what every step of an earlier run wrote here, and start over.
        fresh_from: the same for this step and every later one.

    Returns:
        See `summary`; "ran" names the steps done by this call.

    Raises:
        InputError: recipe, source or an output changed since this directory was begun.
        ResourceError: this machine cannot do a step that is left; nothing was begun.
        StepFailed: a step did not end well; its exit code is the child's. The report is written all the same.
    """
    from q38.pipeline.report import write_report

    setup = prepare(recipe, workdir, source)
    if not setup.work.root.exists():  # nothing is left behind by a machine that does not suffice
        require_machine(setup, setup.step_names)
    with lock(setup.work):
        known = RunState.load(setup.work)
        first = _first_dropped(setup, known, fresh=fresh, fresh_from=fresh_from) if known else None
        require_machine(setup, [name for name, state in _step_states(setup, known, first) if state != "done"])
        state = _open_state(setup, known, fresh=fresh, fresh_from=fresh_from)
        runner = Runner(setup, state, progress)
        memory = MemorySampler(os.getpid())
        try:
            runner.run()
        except StepFailed:
            write_report(setup, state)
            raise
        finally:
            state.peak_memory = max(state.peak_memory, memory.stop()) if runner.ran else state.peak_memory
            state.save(setup.work)
        write_report(setup, state)
    return {**summary(setup, state), "ran": runner.ran}


def dry_run(
    recipe: str | Path,
    workdir: Path,
    *,
    source: Path | None = None,
    fresh: bool = False,
    fresh_from: str | None = None,
) -> dict[str, Any]:
    """What `run` with the same arguments would do; nothing is written.

    Returns:
        "steps": per step its name, command, state ("done", "resume" or "to do") and bytes_out: what
        is there for a finished step, else what the plan expects, None where it cannot be told.
        "lacks": what keeps this machine from a step that is left (`q38.pipeline.preflight.Lack`).
        "left_out": as in `summary`.
    """
    from q38.pipeline.expected import expected_bytes

    setup = prepare(recipe, workdir, source)
    state = RunState.load(setup.work) or RunState.begin(setup.recipe.to_dict(), setup.source_files())
    first = _first_dropped(setup, state, fresh=fresh, fresh_from=fresh_from)
    if first is None:
        refuse_changes(state, setup.recipe.to_dict(), setup.source_files(), setup.steps, setup.work)
    expected = expected_bytes(setup)
    states = dict(_step_states(setup, state, first))
    rows = [
        {
            "step": step.name,
            "state": states[step.name],
            "bytes_out": state.steps[step.name].bytes_out
            if states[step.name] == "done"
            else expected.get(step.name),
            "command": command_line(step.args),
        }
        for step in setup.steps
    ]
    lacks = find_lacks(setup, [name for name, found in states.items() if found != "done"])
    return {
        "workdir": str(workdir),
        "recipe": setup.recipe.name,
        "steps": rows,
        "lacks": [lack.to_dict() for lack in lacks],
        "left_out": left_out(setup.recipe),
    }


def summary(setup: Setup, state: RunState) -> dict[str, Any]:
    """The run in short: one row per step (seconds, bytes, peak memory), the answer, where the report is."""
    records = [state.steps[name] for name in setup.step_names if name in state.steps]
    serve = read_json(setup.work.result("serve")) if "serve" in state.steps else {}
    return {
        "recipe": setup.recipe.name,
        "workdir": str(setup.work.root),
        "model": str(setup.work.model),
        "report": str(setup.work.page),
        "seconds": round(sum(r.seconds for r in records), 3),
        "peak_memory": state.peak_memory,
        "chat": serve.get("chat"),
        "left_out": left_out(setup.recipe),
        "steps": [
            {
                "step": r.name,
                "ok": r.ok,
                "seconds": r.seconds,
                "bytes_in": r.bytes_in,
                "bytes_out": r.bytes_out,
                "peak_memory": r.peak_memory,
                "command": r.command,
            }
            for r in records
        ],
    }


def _step_states(setup: Setup, state: RunState | None, first: str | None) -> Iterator[tuple[str, str]]:
    """(step, "done", "resume" or "to do"); `first` and all after it are to be done anew."""
    done = True
    for step in setup.steps:
        record = state.steps.get(step.name) if state else None
        done = done and step.name != first and record is not None and record.ok
        begun = not done and first is None and any((path / ".q38").exists() for path in step.writes)
        yield step.name, "done" if done else "resume" if begun else "to do"


def _open_state(setup: Setup, state: RunState | None, *, fresh: bool, fresh_from: str | None) -> RunState:
    """The state to go on from, with the steps dropped that the user asked to redo."""
    work, recipe, source = setup.work, setup.recipe.to_dict(), setup.source_files()
    if state is None:
        state = RunState.begin(recipe, source)
    else:
        first = _first_dropped(setup, state, fresh=fresh, fresh_from=fresh_from)
        if first == setup.step_names[0]:
            state = RunState.begin(recipe, source)
            state.discarding = [str(p.relative_to(work.root)) for p in work.outputs()]
        elif first is not None:
            refuse_changes(state, state.recipe, source, setup.steps, work)
            state.recipe = recipe
            state.drop_from(first, setup.steps, work)
        refuse_changes(state, recipe, source, setup.steps, work)
    state.save(work)
    state.finish_discarding(work)
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
    if not work.recipe.exists() or work.recipe.read_text(encoding="utf-8") != text:
        with atomic_file(work.recipe) as f:
            f.write(text.encode())
    return state


def _first_dropped(setup: Setup, state: RunState, *, fresh: bool, fresh_from: str | None) -> str | None:
    """The first step to redo, None to keep all. Refuses a --fresh-from later than what a recipe change touches."""
    names = setup.step_names
    if fresh:
        return names[0]
    if fresh_from is None:
        return None
    if fresh_from not in names:
        raise InputError(
            f"there is no step '{fresh_from}'", where="--fresh-from", remedy=f"steps: {', '.join(names)}"
        )
    recipe = setup.recipe.to_dict()
    if state.recipe != recipe:
        touched = first_touched(state.recipe, recipe, setup.steps)
        if names.index(touched) < names.index(fresh_from):
            raise InputError(
                f"the recipe changed in a section that step {touched} uses",
                where="--fresh-from",
                remedy=f"give {touched}",
            )
    return fresh_from
