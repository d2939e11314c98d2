"""Put the edits into an SGLang tree and take them out again, byte for byte.

Every file is compared with the manifest of its release first, backed up, and replaced by a rename. A run that is
killed leaves each file either as it was or patched, and the next `apply` or `revert` goes on from there.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import write_json
from q38.sglang_ext import manifest
from q38.sglang_ext.patch_edits import EDITS, patched_text
from q38.sglang_ext.source import installed_tree, release
from q38.sglang_ext.targets import EDITED_FILES

RECORD = "sglang/.q38-patch.json"
BACKUP = "sglang/.q38-backup"
SCHEMA = "q38.sglang-patch/1"


@dataclass(frozen=True)
class FileState:
    """One file of the patch. `state` is "original", "patched" or "foreign" (neither)."""

    file: str
    original: str
    patched: str
    state: str


def find_tree(tree: Path | None) -> Path:
    """The directory that holds the package `sglang`: the installed one, or TREE or TREE/python.

    Raises:
        InputError: there is no such package; ResourceError: SGLang is not installed.
    """
    if tree is None:
        return installed_tree()
    for candidate in (tree, tree / "python", tree.parent if tree.name == "sglang" else tree):
        if (candidate / "sglang" / "srt").is_dir():
            return candidate
    raise InputError("holds no sglang package", where=tree, remedy="give the directory that holds sglang/")


def states(tree: Path) -> list[FileState]:
    """What each file of the patch is now.

    Raises:
        CheckFailed: the release is unknown.
    """
    originals = manifest.load_files(release(tree))
    record = _record(tree)
    found = []
    for file in EDITED_FILES:
        path, patched = tree / file, record.get(file, "")
        digest = _sha256(path.read_bytes()) if path.is_file() else ""
        state = "original" if digest == originals[file] else "patched" if digest == patched else "foreign"
        found.append(FileState(file, originals[file], patched, state))
    return found


def patched_mechanisms(tree: Path) -> set[str]:
    """Mechanisms whose edits are all in place in `tree`."""
    if not _record(tree):
        return set()
    patched = {s.file for s in states(tree) if s.state == "patched"}
    names = {edit.mechanism for edit in EDITS}
    return {name for name in names if {e.file for e in EDITS if e.mechanism == name} <= patched}


def apply(tree: Path, *, dry_run: bool = False, writable: bool = True) -> list[Path]:
    """Put the edits in. Returns the files that are (or would be) changed.

    Args:
        dry_run: check everything and change nothing. writable: also check that the tree can be written.

    Raises:
        CheckFailed: unknown release, or a file that is neither the release's nor patched.
        InputError: already patched.
        ResourceError: the tree cannot be written.
    """
    files = states(tree)
    _refuse_foreign(files, tree)
    todo = [s for s in files if s.state == "original"]
    if not todo:
        raise InputError(
            "is already patched", where=tree, remedy="nothing to do; q38 patch-sglang revert undoes it"
        )
    if writable:
        _require_writable(tree, [s.file for s in todo])
    new = {s.file: patched_text(s.file, (tree / s.file).read_text(encoding="utf-8")).encode() for s in todo}
    if not dry_run:
        for state in todo:
            backup = tree / BACKUP / state.file
            backup.parent.mkdir(parents=True, exist_ok=True)
            _replace(backup, (tree / state.file).read_bytes())
        digests = {s.file: s.patched for s in files if s.patched} | {
            f: _sha256(data) for f, data in new.items()
        }
        write_json(tree / RECORD, {"schema": SCHEMA, "release": release(tree), "files": digests})
        for file, data in new.items():
            _replace(tree / file, data)
    return [tree / file for file in new]


def revert(tree: Path, *, dry_run: bool = False) -> list[Path]:
    """Take the edits out: every patched file becomes its backup again. Returns the files changed.

    Raises:
        CheckFailed: a file was edited since, or a backup is not the release's file.
        InputError: not patched.
        ResourceError: the tree cannot be written.
    """
    if not _record(tree):
        raise InputError("is not patched", where=tree, remedy="nothing to do")
    files = states(tree)
    _refuse_foreign(files, tree)
    todo = [s for s in files if s.state == "patched"]
    _require_writable(tree, [s.file for s in todo])
    backups = {
        s.file: (tree / BACKUP / s.file).read_bytes() for s in todo if (tree / BACKUP / s.file).is_file()
    }
    for state in todo:
        if _sha256(backups.get(state.file, b"")) != state.original:
            raise CheckFailed(
                "the backup is missing or not the release's file",
                where=tree / BACKUP / state.file,
                remedy="install SGLang again",
            )
    if not dry_run:
        for file, data in backups.items():
            _replace(tree / file, data)
        (tree / RECORD).unlink()
        shutil.rmtree(tree / BACKUP)
    return [tree / s.file for s in todo]


def _record(tree: Path) -> dict[str, str]:
    """File -> hash of its patched text; empty where the tree was never patched."""
    if not (tree / RECORD).is_file():
        return {}
    document: dict[str, Any] = read_json(tree / RECORD)
    files: dict[str, str] = document.get("files", {}) if document.get("schema") == SCHEMA else {}
    return files


def _refuse_foreign(files: list[FileState], tree: Path) -> None:
    foreign = [s.file for s in files if s.state == "foreign"]
    if foreign:
        raise CheckFailed(
            f"edited by someone else: {', '.join(foreign)}",
            where=tree,
            remedy="install the release again, or undo those edits",
        )


def _require_writable(tree: Path, files: list[str]) -> None:
    for path in [tree / "sglang", *(tree / file for file in files)]:
        if not (os.access(path, os.W_OK) and os.access(path.parent if path.is_file() else path, os.W_OK)):
            raise ResourceError("is read-only", where=path, remedy="copy the tree, or run as its owner")


def _replace(path: Path, data: bytes) -> None:
    """Write beside the file, sync, rename; mode bits stay."""
    temporary = path.with_name(path.name + ".q38-new")
    with temporary.open("wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    if path.exists():
        shutil.copymode(path, temporary)
    temporary.replace(path)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
