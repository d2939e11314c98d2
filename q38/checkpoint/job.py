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
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Self

import q38
from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import TEMPORARY, FileRecord, write_json, writing

MANIFEST = "MANIFEST.json"
SCHEMA = "q38.manifest/1"
STATE = ".q38"
PACKAGES = ("torch", "transformers", "auto-round", "safetensors", "tokenizers", "sglang", "triton")


class Job:
    """An output directory being filled. Use as a context manager: it holds a lock on the directory.

    Args:
        out: the directory; made if absent.
        step: name of the step, for example "split-ple".
        identity: everything the output depends on, JSON-able: input fingerprints, recipe, parameters.
        fresh: remove what an earlier run of q38 left here (only files it recorded) and start over.

    Raises:
        InputError: the directory holds files q38 did not write, was written by another step or with
            another identity (the first difference is named), or another process is writing it.
    """

    manifest = MANIFEST  # the file whose presence means that the job is finished
    schema = SCHEMA

    def __init__(self, out: Path, step: str, identity: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.out = out
        self.step = step
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))  # as it will be read back
        self.done: dict[str, dict[str, Any]] = {}
        self.files: dict[str, dict[str, Any]] = {}
        self.up_to_date = False
        self._fresh = fresh
        self._lock: Any = None
        self._started = time.time()

    def __enter__(self) -> Self:
        with writing(self.out):
            self.out.mkdir(parents=True, exist_ok=True)
        if not self._fresh and (manifest := self._finished()) is not None:
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
            self._lock = (self.state / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InputError(
                "another q38 process is writing here", where=self.out, remedy="wait for it, or stop it"
            ) from None
        if self._fresh:
            self._clear()
        job_file = self.state / "job.json"
        if job_file.exists():
            self._compare(read_json(job_file))
            self._replay()
        else:
            write_json(job_file, {"schema": self.schema, "step": self.step, "identity": self.identity})
        self._remove_temporaries()
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
        with writing(self.state), (self.state / "journal.jsonl").open("ab") as f:
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
        manifest = read_json(path)
        if manifest.get("schema") != self.schema:
            raise InputError(
                "was not written by this version of q38", where=path, remedy="choose another output directory"
            )
        for name, record in manifest["files"].items():
            file = self.out / name
            if not _is_whole(file, record):
                raise InputError(
                    "was written by q38 and is now missing or of another size",
                    where=file,
                    remedy="run again with --fresh to rebuild",
                )
        return manifest

    def _compare(self, earlier: Mapping[str, Any]) -> None:
        if earlier.get("step") != self.step:
            raise InputError(
                f"was written by q38 {earlier.get('step')}",
                where=self.out,
                remedy="choose another output directory",
            )
        if difference := first_difference(earlier.get("identity"), self.identity):
            key, before, now = difference
            raise InputError(
                f"was begun with another {key} ({before}, now {now})",
                where=self.out,
                remedy="restore it, choose another output directory, or start over with --fresh",
            )

    def _replay(self) -> None:
        for line in self._read_journal():
            self._add(line)
        lost = {name for name, record in self.files.items() if not _is_whole(self.out / name, record)}
        for unit, line in list(self.done.items()):
            if not lost.isdisjoint(line["files"]):
                del self.done[unit]  # its file was removed or cut since: do it again
        self.files = {name: record for name, record in self.files.items() if name not in lost}

    def _read_journal(self) -> list[dict[str, Any]]:
        """The finished units. A kill can tear the last line: it is cut off, and its unit done again."""
        journal = self.state / "journal.jsonl"
        if not journal.exists():
            return []
        data = journal.read_bytes()
        whole = data[: data.rfind(b"\n") + 1]
        if len(whole) < len(data):
            with journal.open("r+b") as f:
                f.truncate(len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise InputError(
                "the journal of the unfinished run is damaged",
                where=journal,
                remedy="start over with --fresh",
            ) from None

    def _add(self, line: dict[str, Any]) -> None:
        self.done[line["unit"]] = line
        self.files.update(line["files"])

    def _clear(self) -> None:
        names: set[str] = set()
        if (self.out / self.manifest).exists():
            names |= set(read_json(self.out / self.manifest).get("files", {}))
            (self.out / self.manifest).unlink()
        with suppress(InputError):  # a damaged journal is one reason to start over
            names |= {name for line in self._read_journal() for name in line["files"]}
        for name in names:
            (self.out / name).unlink(missing_ok=True)
        for path in self.state.iterdir():
            if path.name != "lock":
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _remove_temporaries(self) -> None:
        for path in self.out.rglob(f"*{TEMPORARY}"):
            path.unlink()


def _is_whole(file: Path, record: Mapping[str, Any]) -> bool:
    return file.is_file() and file.stat().st_size == record["bytes"]


def discard(out: Path) -> None:
    """Remove what q38 wrote at `out`: a file, or a directory with a manifest or an unfinished job.

    Only files that were recorded go; the manifest and the journal go last, so a kill in between can be repeated.
    """
    if out.is_file():
        out.unlink()
        return
    if not out.is_dir():
        return
    manifest, state = out / MANIFEST, out / STATE
    names = set(read_json(manifest).get("files", {})) if manifest.exists() else set()
    journal = state / "journal.jsonl"
    if journal.exists():
        for line in journal.read_bytes().splitlines(keepends=True):
            if line.endswith(b"\n"):
                names |= set(json.loads(line)["files"])
    for name in names:
        (out / name).unlink(missing_ok=True)
    for path in out.rglob(f"*{TEMPORARY}"):
        path.unlink()
    shutil.rmtree(state, ignore_errors=True)
    manifest.unlink(missing_ok=True)
    for directory, _, _ in os.walk(out, topdown=False):
        with suppress(OSError):  # not empty: it holds files of others
            Path(directory).rmdir()


def first_difference(before: Any, now: Any, path: str = "") -> tuple[str, str, str] | None:
    """Dotted key and both values of the first place where two JSON values differ; None if equal."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if found := first_difference(before.get(key), now.get(key), f"{path}.{key}" if path else key):
                return found
        return None
    if before == now:
        return None
    return path or "identity", _short(before), _short(now)


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
