"""WORKDIR/run.json: what has been done, with what, and whether that still holds.

The file is replaced atomically after every step. A step counts as done only when its record is in
it, so a kill at any moment repeats at most the step in hand, which resumes by its own journal.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import q38
from q38.base.errors import InputError
from q38.base.packages import installed_packages
from q38.checkpoint.index import read_json
from q38.checkpoint.job import discard, first_difference, package_versions
from q38.checkpoint.writer import write_json, writing
from q38.pipeline.fingerprint import fingerprint
from q38.pipeline.steps import Step, Workdir
from q38.serving.machine import probe

SCHEMA = "q38.run/1"


@dataclass
class Record:
    """What is known of one finished step. Sizes in bytes."""

    name: str
    ok: bool
    command: str
    identity: dict[str, Any]
    started: str
    seconds: float
    bytes_in: int
    bytes_out: int
    peak_memory: int
    exit_code: int
    outputs: dict[str, str] = field(default_factory=dict)


@dataclass
class RunState:
    """The contents of run.json."""

    recipe: dict[str, Any]
    source: dict[str, str]  # file name -> hash; empty for a synthetic model
    created: str
    versions: dict[str, str]
    peak_memory: int = 0
    machine: dict[str, Any] = field(default_factory=dict)  # where the run began
    packages: dict[str, str] = field(default_factory=dict)  # every installed one, when it began
    steps: dict[str, Record] = field(default_factory=dict)
    discarding: list[str] = field(default_factory=list)  # outputs of dropped steps still to be removed

    @classmethod
    def begin(cls, recipe: dict[str, Any], source: dict[str, str]) -> RunState:
        created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        versions = {"q38": q38.__version__, **package_versions()}
        return cls(
            recipe, source, created, versions, machine=probe().to_record(), packages=installed_packages()
        )

    @classmethod
    def load(cls, work: Workdir) -> RunState | None:
        """The state of an earlier run, None if there was none.

        Raises:
            InputError: the directory holds other things, or its run.json is not one of ours.
        """
        if not work.state.exists():
            if work.root.exists() and (not work.root.is_dir() or any(work.root.iterdir())):
                raise InputError(
                    "holds files that q38 run did not write",
                    where=work.root,
                    remedy="choose a new or empty directory",
                )
            return None
        value = read_json(work.state)
        if value.pop("schema", None) != SCHEMA:
            raise InputError(f"is no {SCHEMA} file", where=work.state, remedy="choose another --workdir")
        steps = {name: Record(**record) for name, record in value.pop("steps").items()}
        return cls(steps=steps, **value)

    def save(self, work: Workdir) -> None:
        write_json(work.state, {"schema": SCHEMA, **asdict(self)})

    def drop_from(self, first: str, order: Sequence[Step], work: Workdir) -> None:
        """Forget `first` and every later step, and remove what they wrote; so too what is no step any more.

        A kill in between is made good later.
        """
        kept = order[: [step.name for step in order].index(first)]
        self.steps = {step.name: self.steps[step.name] for step in kept if step.name in self.steps}
        written = {path for step in kept for path in step.writes}
        self.discarding = [str(p.relative_to(work.root)) for p in work.outputs() if p not in written]
        self.save(work)
        self.finish_discarding(work)

    def finish_discarding(self, work: Workdir) -> None:
        """Remove the outputs of dropped steps."""
        if not self.discarding:
            return
        for name in self.discarding:
            discard(work.root / name)
        self.discarding = []
        self.save(work)


@contextmanager
def lock(work: Workdir) -> Iterator[None]:
    """Hold the directory: one run at a time. The lock is on the directory itself, so no file stays behind."""
    with writing(work.root):
        work.root.mkdir(parents=True, exist_ok=True)
        fd = os.open(work.root, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "another q38 run is working here", where=work.root, remedy="wait for it, or stop it"
            ) from None
        yield
    finally:
        os.close(fd)


def refuse_changes(
    state: RunState,
    recipe: Mapping[str, Any],
    source: Mapping[str, str],
    order: Sequence[Step],
    work: Workdir,
) -> None:
    """Refuse when the recipe or the source is not the one that this directory was begun with.

    Raises:
        InputError: names the first difference, and the first step that it touches.
    """
    if found := first_difference(state.source, dict(source)):
        raise InputError(
            f"the source changed since this run began: {_explain(found)}",
            where=work.root,
            remedy="restore it, choose another --workdir, or start over with --fresh",
        )
    if found := first_difference(state.recipe, dict(recipe)):
        step = first_touched(state.recipe, recipe, order)
        raise InputError(
            f"this run was begun with another recipe: {_explain(found)}",
            where=work.root,
            remedy=f"restore it, choose another --workdir, or redo what it touches with --fresh-from {step}",
        )


def first_touched(before: Mapping[str, Any], now: Mapping[str, Any], order: Sequence[Step]) -> str:
    """The first step that depends on a recipe section which differs."""
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    return next((step.name for step in order if changed & set(step.sections)), order[0].name)


def refuse_stale(record: Record, identity: Mapping[str, Any], work: Workdir) -> None:
    """Refuse when a finished step would now be another one, or when its outputs are no longer what it wrote."""
    remedy = f"redo it and what follows with --fresh-from {record.name}"
    if found := first_difference(record.identity, dict(identity)):
        raise InputError(
            f"step {record.name} was done with another {_explain(found)}", where=work.root, remedy=remedy
        )
    for name, expected in record.outputs.items():
        file = work.root / name
        if not file.exists():
            raise InputError(f"step {record.name} wrote this file and it is gone", where=file, remedy=remedy)
        try:
            same = fingerprint(file) == expected
        except InputError:
            same = False
        if not same:
            raise InputError(
                f"this file changed since step {record.name} wrote it", where=file, remedy=remedy
            )


def _explain(difference: tuple[str, str, str]) -> str:
    key, before, now = difference
    return f"{key} ({before}, now {now})"
