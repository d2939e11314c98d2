"""What a job recorded of itself in its directory, and the removal of just that."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from q38.base.errors import InputError
from q38.checkpoint.paths import reading, require_inside
from q38.checkpoint.writer import TEMPORARY

LOCK, JOB, JOURNAL = "lock", "job.json", "journal.jsonl"  # in the job's state
START_OVER = "start over with --fresh"


class Damaged(InputError):
    """A record of what q38 wrote cannot be read, so nothing is known from it."""


def files_of(manifest: Mapping[str, Any], file: Path) -> dict[str, dict[str, Any]]:
    """The files that a manifest lists, name -> record.

    Args:
        file: the manifest.

    Raises:
        InputError: it is damaged, or names a file outside the directory.
    """
    files = manifest.get("files")
    if not _are_records(files):
        raise Damaged("lists no files with their sizes and hashes", where=file, remedy=START_OVER)
    require_inside(files, file)
    return files


def _are_records(files: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    return isinstance(files, dict) and all(
        isinstance(r, dict) and isinstance(r.get("bytes"), int) and isinstance(r.get("sha256"), str)
        for r in files.values()
    )


def recorded(manifest: Path, state: Path) -> tuple[set[str], list[Damaged]]:
    """Names of all files that the manifest and the journal list, and what of the two could not be read.

    Raises:
        InputError: one of them names a file outside the directory.
    """
    names: set[str] = set()
    unread: list[Damaged] = []
    try:
        if manifest.exists():
            names |= files_of(read_record(manifest), manifest).keys()
    except Damaged as damage:
        unread.append(damage)
    try:
        names |= {name for line in read_journal(state / JOURNAL) for name in line["files"]}
    except Damaged as damage:
        unread.append(damage)
    return names, unread


def remove(names: Iterable[str], manifest: Path, state: Path) -> None:
    """Remove recorded files, temporaries, then the job's state but its lock, then the manifest.

    After a kill in between, what is left still says what is to be removed; and no unit counts as done whose files are
    gone, because the journal goes before the identity it belongs to.

    Raises:
        InputError: a link on the way to a file leaves the directory; nothing was removed.
    """
    root = manifest.parent
    files = [root / name for name in names]
    for file in files:
        if not file.parent.resolve().is_relative_to(root.resolve()):
            raise InputError(
                "lies behind a link that leaves the directory", where=file, remedy="remove the link"
            )
    for file in files:
        file.unlink(missing_ok=True)
    remove_temporaries(root)
    (state / JOURNAL).unlink(missing_ok=True)
    for path in state.iterdir() if state.is_dir() else ():
        if path.name not in (LOCK, JOB):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (state / JOB).unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)


def remove_temporaries(root: Path) -> None:
    """Remove what a kill left half written."""
    for path in root.rglob(f"*{TEMPORARY}"):
        path.unlink()


def read_record(file: Path) -> dict[str, Any]:
    """A JSON file of q38's own.

    Raises:
        Damaged: it is no JSON object. Unlike a damaged input it is no reason to download anything.
        InputError: it cannot be read.
    """
    with reading(file):
        data = file.read_bytes()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"not valid JSON ({error})", where=file, remedy=START_OVER) from None
    if not isinstance(value, dict):
        raise Damaged("not a JSON object", where=file, remedy=START_OVER)
    return value


def read_journal(journal: Path, *, cut: bool = False) -> list[dict[str, Any]]:
    """The finished units. A kill can tear the last line: it does not count, and with `cut` it is cut off."""
    if not journal.exists():
        return []
    with reading(journal):
        data = journal.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if cut and len(whole) < len(data):
        with journal.open("r+b") as f:
            f.truncate(len(whole))
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in whole.splitlines()]
        good = all(isinstance(line["unit"], str) and _are_records(line["files"]) for line in lines)
    except (ValueError, KeyError, TypeError):
        good = False
    if not good:
        raise Damaged("the journal of the unfinished run is damaged", where=journal, remedy=START_OVER)
    require_inside([name for line in lines for name in line["files"]], journal)
    return lines
