"""A resumable job that fills one output directory, and the manifest it leaves.

While it runs, OUT/.q38/job.json holds its identity (inputs, recipe, parameters) and
OUT/.q38/journal.jsonl one line per finished unit, fsynced before the next begins. After a kill the
same command reads the journal and goes on. At the end MANIFEST.json replaces both.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import q38
from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.paths import refuse_inputs
from q38.checkpoint.recorded import (
    JOB,
    JOURNAL,
    LOCK,
    Damaged,
    files_of,
    read_journal,
    read_record,
    recorded,
    remove,
    remove_temporaries,
)
from q38.checkpoint.writer import FileRecord, write_json, writing

MANIFEST = "MANIFEST.json"
SCHEMA = "q38.manifest/1"
_ABSENT = "not recorded"  # in the place of a value that the earlier of two has not
STATE = ".q38"
PACKAGES = ("torch", "transformers", "auto-round", "safetensors", "tokenizers", "sglang", "triton")


class Job:
    """An output directory being filled. Use as a context manager: it holds a lock on the directory.

    Args:
        out: the directory; made if absent.
        step: name of the step, for example "split-ple".
        identity: everything the output depends on, JSON-able: input fingerprints, recipe, parameters.
        inputs: files and directories that the step reads; None is passed over.
        below_input: `out` may lie in an input.
        fresh: remove what an earlier run of this step left here (only files it recorded) and start over;
            its identity may differ.
        progress: told where a damaged record keeps `fresh` from removing files.

    Raises:
        InputError: the directory is an input, holds one or lies in one; holds files q38 did not write; was
            written by another step or with another identity (the first difference is named); its manifest
            is damaged or names a file outside it; or another process is writing it.
    """

    manifest = MANIFEST  # the file whose presence means that the job is finished
    schema = SCHEMA

    def __init__(
        self,
        out: Path,
        step: str,
        identity: Mapping[str, Any],
        *,
        inputs: Iterable[Path | None] = (),
        below_input: bool = False,
        fresh: bool = False,
        progress: Progress = SILENT,
    ) -> None:
        self.out = out
        self.step = step
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))  # as it will be read back
        self.done: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.up_to_date = False
        self._inputs, self._below_input = tuple(inputs), below_input
        self._fresh, self._progress = fresh, progress
        self._lock: Any = None
        self._started = time.time()

    def __enter__(self) -> Self:
        refuse_inputs(self.out, self._inputs, below=self._below_input)
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if self._fresh:
            self._refuse_others()
        elif (manifest := self._finished()) is not None:
            self._compare(manifest)
            self.files = manifest["files"]
            self.up_to_date = True
            shutil.rmtree(self.state, ignore_errors=True)  # a kill between manifest and clean-up leaves it
            return self
        if not self.state.exists() and not (self.out / self.manifest).exists() and any(self.out.iterdir()):
            raise InputError(
                "holds files that q38 did not write", where=self.out, remedy="choose a new or empty directory"
            )
        with writing(self.out):
            self.state.mkdir(exist_ok=True)
            self._lock = (self.state / LOCK).open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "another q38 process is writing here", where=self.out, remedy="wait for it, or stop it"
            ) from None
        if self._fresh:
            self._clear()
        job_file = self.state / JOB
        if job_file.exists():
            self._compare(read_record(job_file))
            self._replay()
        else:
            write_json(job_file, {"schema": self.schema, "step": self.step, "identity": self.identity})
        remove_temporaries(self.out)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._lock is not None:
            self._lock.close()

    @property
    def state(self) -> Path:
        """Where the job keeps its state while it runs; scratch files may live here too."""
        return self.out / STATE

    def commit(self, unit: str, *, files: Mapping[str, FileRecord] | None = None, result: Any = None) -> None:
        """Record that `unit` is finished and which files (relative names) it wrote. Durable on return."""
        line = {
            "unit": unit,
            "files": {name: r.to_dict() for name, r in (files or {}).items()},
            "result": result,
        }
        with writing(self.state), (self.state / JOURNAL).open("ab") as f:
            f.write(json.dumps(line).encode() + b"\n")
            f.flush()
            os.fsync(f.fileno())
        self._add(line)

    def finish(self, result: Any = None) -> dict[str, Any]:
        """Write MANIFEST.json and remove the job's state. Returns the manifest."""
        manifest = {
            "schema": self.schema,
            "step": self.step,
            "q38": q38.__version__,
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "versions": package_versions(),
            "identity": self.identity,
            "files": dict(sorted(self.files.items())),
            "result": result,
        }
        write_json(self.out / self.manifest, manifest)
        shutil.rmtree(self.state)
        return manifest

    def _finished(self) -> dict[str, Any] | None:
        """The manifest of an earlier complete run whose files are all still there."""
        path = self.out / self.manifest
        if not path.exists():
            return None
        manifest = read_record(path)
        self._require_schema(manifest)
        for name, record in files_of(manifest, path).items():
            file = self.out / name
            if not _is_whole(file, record):
                raise InputError(
                    "was written by q38 and is now missing or of another size",
                    where=file,
                    remedy="run again with --fresh to rebuild",
                )
        return manifest

    def _refuse_others(self) -> None:
        """With `fresh`: what lies here must be of this step, so far as it can still be read."""
        with suppress(Damaged):
            if (self.out / self.manifest).exists():
                manifest = read_record(self.out / self.manifest)
                self._require_schema(manifest)
                self._compare_step(manifest)
        with suppress(Damaged):
            if (self.state / JOB).exists():
                self._compare_step(read_record(self.state / JOB))

    def _require_schema(self, manifest: Mapping[str, Any]) -> None:
        if manifest.get("schema") != self.schema:
            raise InputError(
                "was not written by this version of q38",
                where=self.out / self.manifest,
                remedy="choose another output directory",
            )

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        self._compare_step(earlier)
        if difference := first_difference(earlier.get("identity"), self.identity):
            key, before, now = difference
            if before is _ABSENT:
                raise InputError(
                    f"was begun without {key} ({now} now), by other inputs or an earlier q38",
                    where=self.out,
                    remedy="start over with --fresh (in a run: --fresh-from the step), or choose another output directory",
                )
            raise InputError(
                f"was begun with another {key} ({before}, now {now})",
                where=self.out,
                remedy="restore it, choose another output directory, or start over with --fresh",
            )

    def _compare_step(self, earlier: Mapping[str, Any]) -> None:
        if earlier.get("step") != self.step:
            raise InputError(
                f"was written by q38 {earlier.get('step')}",
                where=self.out,
                remedy="choose another output directory",
            )

    def _replay(self) -> None:
        for line in read_journal(self.state / JOURNAL, cut=True):
            self._add(line)
        lost = {name for name, record in self.files.items() if not _is_whole(self.out / name, record)}
        for unit, line in list(self.done.items()):
            if not lost.isdisjoint(line["files"]):
                del self.done[unit]  # its file was removed or cut since: do it again
        self.files = {name: record for name, record in self.files.items() if name not in lost}

    def _add(self, line: dict[str, Any]) -> None:
        self.done[line["unit"]] = line
        self.files.update(line["files"])

    def _clear(self) -> None:
        manifest = self.out / self.manifest
        names, unread = recorded(manifest, self.state)
        for damage in unread:
            self._progress.say(
                f"{damage.where}: {damage.what}. Files that only it listed stay, or are written over."
            )
        remove(names, manifest, self.state)


def read_manifest(root: Path) -> dict[str, Any] | None:
    """MANIFEST.json of a directory that q38 wrote, None if there is none.

    Raises:
        InputError: it is damaged, or names a file outside the directory.
    """
    path = root / MANIFEST
    if not path.exists():
        return None
    try:
        manifest = read_record(path)
        files_of(manifest, path)
    except Damaged as damage:
        raise InputError(damage.what, where=path, remedy="make the directory again, or restore it") from None
    return manifest


def discard(out: Path) -> None:
    """Remove what q38 wrote at `out`: a file, or a directory with a manifest or an unfinished job.

    Only files that were recorded go; the manifest and the journal go last, so a kill in between can be repeated.

    Raises:
        InputError: the manifest or the journal is damaged or names a file outside the directory; nothing was
            removed.
    """
    if out.is_file():
        out.unlink()
        return
    if not out.is_dir():
        return
    manifest, state = out / MANIFEST, out / STATE
    names, unread = recorded(manifest, state)
    if unread:
        raise InputError(
            f"{unread[0].what}, so which files q38 wrote is not known",
            where=unread[0].where,
            remedy=f"remove {out} by hand",
        )
    remove(names, manifest, state)
    (state / LOCK).unlink(missing_ok=True)
    for directory, _, _ in os.walk(out, topdown=False):
        with suppress(OSError):  # not empty: it holds files of others
            Path(directory).rmdir()


def _is_whole(file: Path, record: Mapping[str, Any]) -> bool:
    return file.is_file() and file.stat().st_size == record["bytes"]


def first_difference(before: Any, now: Any, path: str = "") -> tuple[str, str, str] | None:
    """Dotted key and both values of the first place where two JSON values differ; None if equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            old = before.get(key, _ABSENT if now.get(key) is not None else None)
            if found := first_difference(old, now.get(key), f"{path}.{key}" if path else key):
                return found
        return None
    if before == now:
        return None
    return path or "identity", _ABSENT if before is _ABSENT else _short(before), _short(now)


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."


def package_versions() -> dict[str, str]:
    """Installed versions of the packages that shape an output."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions
