"""`q38 release check`: does a directory still hold what was sealed, and nothing else?"""

from __future__ import annotations

import os
import random
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from q38.base import settings
from q38.base.errors import InputError
from q38.base.files import require_directory
from q38.base.progress import SILENT, Progress
from q38.base.threads import spread
from q38.checkpoint.header import read_header
from q38.release.hashing import SealedFile, hash_range
from q38.release.layout import RELEASE, files_below
from q38.release.seal import BrokenSeal, Seal, parse_digest, read_seal

SCHEMA = "q38.release-check/1"
_SHARD = ".safetensors"
_SHOWN = 3  # tensors named for a changed piece
# A thread that waits for the disk hashes nothing, so there are more of them than cores.
_THREADS_PER_CORE = 2


@dataclass(frozen=True)
class Fault:
    """One file at fault. `kind` is "changed", "missing" or "extra"."""

    file: str
    kind: str
    what: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class Piece:
    """Bytes [start, stop) of a file and the sha256 they must have."""

    name: str
    start: int
    stop: int
    sha256: str

    @property
    def key(self) -> str:
        return f"{self.start}:{self.name}"


def check(
    root: Path,
    *,
    full: bool = False,
    digest: str | None = None,
    seed: int | None = None,
    threads: int | None = None,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Compare a directory with its seal.

    Without `full`: RELEASE.json itself; that every file is there with its size and none beside them; the header of
    every safetensors file; every file of one piece, and of each larger one a piece chosen at random.

    Args:
        full: hash every byte.
        digest: the seal that RELEASE.json must have, from wherever the release was announced.
        seed: of the choice of pieces; without one each call chooses others.
        threads: default two per core.

    Returns:
        {"schema", "release", "passed", "full", "seal", "files", "bytes", "bytes_read", "seconds", "faults"}, each fault
        with "file", "kind" and "what".

    Raises:
        InputError: no such directory, or it holds no RELEASE.json.
    """
    require_directory(root, remedy="give the directory of a release")
    wanted = None if digest is None else parse_digest(digest)
    started = time.monotonic()
    try:
        seal = read_seal(root)
    except BrokenSeal as error:
        fault = Fault(RELEASE, "changed", f"{error.what}; nothing else was compared")
        return _report(root, None, [fault], 0, full, started)
    faults = []
    if wanted not in (None, seal.digest):
        faults.append(Fault(RELEASE, "changed", f"is sealed as {seal.digest}, not as --digest says"))
    faults += _listing_faults(root, seal)
    if not full:  # a full check reads the headers anyway
        faults += _header_faults(root, _without(seal.files, faults))
    whole = _without(seal.files, faults)
    pieces = list(_pieces(whole, seal.piece, random.Random(seed), full=full))
    threads = threads or _THREADS_PER_CORE * settings.cpu_count()
    faults += _piece_faults(root, seal, pieces, threads, progress)
    return _report(root, seal, faults, sum(p.stop - p.start for p in pieces), full, started)


def _listing_faults(root: Path, seal: Seal) -> list[Fault]:
    """Files that are missing, too short or too long, no files, or not in the seal."""
    faults = []
    for name, record in seal.files.items():
        try:
            state = (root / name).stat()  # through links: a download may be one into a cache
        except OSError as error:
            faults.append(Fault(name, "missing", f"is missing ({error.strerror})"))
            continue
        if not stat.S_ISREG(state.st_mode):
            faults.append(Fault(name, "changed", "is not a file"))
        elif state.st_size != record.bytes:
            faults.append(
                Fault(name, "changed", f"has {state.st_size:,} bytes, {record.bytes:,} were sealed")
            )
    extra = files_below(root).keys() - seal.files.keys() - {RELEASE}
    return faults + [Fault(_printable(name), "extra", "was not sealed") for name in sorted(extra)]


def _printable(name: str) -> str:
    """A name from the disk, whose bytes need not be UTF-8."""
    return os.fsencode(name).decode(errors="replace")


def _without(files: dict[str, SealedFile], faults: list[Fault]) -> dict[str, SealedFile]:
    at_fault = {fault.file for fault in faults}
    return {name: record for name, record in files.items() if name not in at_fault}


def _header_faults(root: Path, files: dict[str, SealedFile]) -> list[Fault]:
    faults = []
    for name in files:
        if name.endswith(_SHARD):
            try:
                read_header(root / name)
            except InputError as error:
                faults.append(Fault(name, "changed", error.what))
    return faults


def _pieces(
    files: dict[str, SealedFile], piece: int, chance: random.Random, *, full: bool
) -> Iterable[Piece]:
    for name, record in files.items():
        ranges = record.ranges(piece)
        yield from (Piece(name, *r) for r in (ranges if full else [chance.choice(ranges)]))


def _piece_faults(
    root: Path, seal: Seal, pieces: list[Piece], threads: int, progress: Progress
) -> list[Fault]:
    """Hash the pieces and name the files with one that differs."""
    found: dict[Piece, str] = {}
    unreadable: dict[str, str] = {}
    by_key = {piece.key: piece for piece in pieces}

    def done(key: str, result: str | OSError) -> None:
        piece = by_key[key]
        if isinstance(result, OSError):
            unreadable[piece.name] = str(result.strerror)
        else:
            found[piece] = result

    spread(
        {p.key: partial(_hash_or_error, root / p.name, p.start, p.stop) for p in pieces},
        done,
        label="check",
        total=sum(p.stop - p.start for p in pieces),
        workers=threads,
        progress=progress,
    )
    faults = [Fault(name, "changed", f"cannot be read ({why})") for name, why in unreadable.items()]
    wrong: dict[str, list[Piece]] = {}
    for piece in pieces:
        if piece.name not in unreadable and found[piece] != piece.sha256:
            wrong.setdefault(piece.name, []).append(piece)
    for name, changed in wrong.items():
        digests = [found[p] for p in pieces if p.name == name]
        faults.append(Fault(name, "changed", _describe(root, seal, name, changed, digests)))
    return faults


def _hash_or_error(file: Path, start: int, stop: int, advance: Any) -> str | OSError:
    try:
        return hash_range(file, start, stop, advance)
    except OSError as error:  # a bad sector is a finding; the other files are still read
        return error


def _describe(root: Path, seal: Seal, name: str, changed: list[Piece], digests: list[str]) -> str:
    """Which bytes differ, what lies there, and whose bytes they are instead."""
    for other, record in seal.files.items():
        if other != name and digests == [sha256 for _, _, sha256 in record.ranges(seal.piece)]:
            return f"holds the bytes of {other}"
    if len(digests) == 1 == len(seal.files[name].ranges(seal.piece)):
        return f"sha256 is {digests[0][:12]}..., {changed[0].sha256[:12]}... was sealed"
    places = ", ".join(f"{p.start:,} to {p.stop - 1:,}" for p in changed[:_SHOWN])
    more = f" and {len(changed) - _SHOWN} more ranges" if len(changed) > _SHOWN else ""
    text = f"differs in bytes {places}{more}"
    tensors = _tensors_in(root / name, changed)
    if tensors:
        rest = f" and {len(tensors) - _SHOWN} more tensors" if len(tensors) > _SHOWN else ""
        text += f" (there lie {', '.join(tensors[:_SHOWN])}{rest})"
    return text


def _tensors_in(file: Path, pieces: list[Piece]) -> list[str]:
    """Tensors that lie in the changed pieces; none where the header cannot be read."""
    if file.suffix != _SHARD:
        return []
    try:
        header = read_header(file)
    except InputError:
        return []
    return [
        t.name for t in header.tensors.values() if any(t.begin < p.stop and p.start < t.end for p in pieces)
    ]


def _report(
    root: Path, seal: Seal | None, faults: list[Fault], read: int, full: bool, started: float
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "release": str(root),
        "passed": not faults,
        "full": full,
        "seal": seal.digest if seal else None,
        "name": seal.document["name"] if seal else None,
        "files": len(seal.files) if seal else 0,
        "bytes": seal.nbytes if seal else 0,
        "bytes_read": read,
        "seconds": round(time.monotonic() - started, 3),
        "faults": [fault.to_dict() for fault in sorted(faults, key=lambda f: (f.file, f.kind))],
    }
