"""The files of a checkpoint against the manifest that was written with them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q38.base.progress import SILENT, Progress, Task
from q38.checkpoint.paths import read_chunks
from q38.checkpoint.writer import TEMPORARY, writing
from q38.measure.checks import Check, Fault

SHARD = ".safetensors"


def check_files(root: Path, manifest: Mapping[str, Any]) -> Check:
    """Every file of the manifest is there with its size, and those that are no shards with their hash."""
    faults = []
    for name, record in manifest["files"].items():
        file = root / name
        if not file.is_file():
            faults.append(Fault(name, None, "is missing"))
        elif (size := file.stat().st_size) != record["bytes"]:
            faults.append(Fault(name, None, f"has {size} bytes, the manifest says {record['bytes']}"))
        elif file.suffix != SHARD:
            faults += _hash_fault(file, name, record)
    return Check.of_faults("manifest", faults, checked=len(manifest["files"]), unit="files")


def check_shards(root: Path, manifest: Mapping[str, Any], *, progress: Progress = SILENT) -> Check:
    """sha256 of every shard against the manifest: finds any flipped bit, also one that no other check can see."""
    shards = {n: r for n, r in manifest["files"].items() if n.endswith(SHARD) and (root / n).is_file()}
    faults = []
    with progress.task("sha256", sum(record["bytes"] for record in shards.values())) as task:
        for name, record in shards.items():
            faults += _hash_fault(root / name, name, record, task)
    return Check.of_faults("shard hashes", faults, checked=len(shards), unit="files")


def require_writable(file: Path) -> None:
    """Refuse a target that cannot be written before the long work, not after it.

    Raises:
        InputError: the directory cannot be made or written.
        ResourceError: the disk is full.
    """
    probe = file.with_name(file.name + TEMPORARY)
    with writing(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink()


def _hash_fault(file: Path, name: str, record: Mapping[str, Any], task: Task | None = None) -> list[Fault]:
    found = _sha256(file, task)
    if found == record["sha256"]:
        return []
    return [Fault(name, None, f"sha256 is {found[:12]}..., the manifest says {record['sha256'][:12]}...")]


def _sha256(file: Path, task: Task | None = None) -> str:
    digest = hashlib.sha256()
    for chunk in read_chunks(file):
        digest.update(chunk)
        if task:
            task.advance(len(chunk))
    return digest.hexdigest()
