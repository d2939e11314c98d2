"""`q38 release build`: a new directory with everything that belongs to a model, sealed.

Files are hard links where the file system allows it, so that a release of 90 GB takes no space and no
time but that of hashing. A kill at any moment is resumed by the same call: each placed file is in the
journal of the job with its hashes, size and time, and RELEASE.json comes last.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import q38
from q38.base import settings
from q38.base.errors import CheckFailed, InputError
from q38.base.packages import installed_packages
from q38.base.progress import SILENT, Progress
from q38.base.threads import Advance, spread
from q38.checkpoint.job import STATE, Job
from q38.checkpoint.paths import read_chunks, refuse_inputs
from q38.checkpoint.writer import atomic_file, fsync_directory, require_free_space, writing
from q38.release.card import make_card, read_card
from q38.release.collect import SHOWN, Contents, Item, require_uploadable
from q38.release.hashing import PIECE, Hasher, SealedFile, hash_file
from q38.release.layout import (
    ATTRIBUTES,
    ATTRIBUTES_TEXT,
    CARD,
    LARGE_FILE,
    RELEASE,
    SUMS,
    files_below,
)
from q38.release.seal import SCHEMA, read_seal, sums_text, write_seal

_GENERATED = 2**20  # bytes kept free for the card, the sums and the seal
_NO_LINK = frozenset({errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.EOPNOTSUPP, errno.ENOSYS})
_CHUNK = 2**20


class ReleaseJob(Job):
    """The directory of a release while it is filled; RELEASE.json ends it, MANIFEST.json is the model's own."""

    manifest = RELEASE
    schema = SCHEMA


def build(
    contents: Contents,
    out: Path,
    *,
    name: str | None = None,
    base_model: str | None = None,
    license: str | None = None,
    card: Path | None = None,
    copy: bool = False,
    read_only: bool = False,
    dry_run: bool = False,
    fresh: bool = False,
    piece: int = PIECE,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Make the release.

    Args:
        contents: from `q38.release.collect` or `q38.pipeline.releasing`.
        out: directory to fill; a killed build goes on with the same call.
        name: title of the card; default: of the recipe, or of the model's directory.
        base_model: hub name of the model that this one was quantized from, for the card.
        license: identifier for the card, instead of what the source checkpoint says.
        card: a model card of your own, instead of the one made from the reports.
        copy: copy every file instead of linking it.
        read_only: take away all write permissions at the end. Implies `copy`: a link shares its permissions.
        dry_run: write nothing; return what would be done.
        piece: bytes of a piece of a large file, each of which gets a hash of its own.

    Returns:
        {"release", "seal", "files", "bytes", "linked", "up_to_date", "read_only", "warnings"}; with dry_run
        {"release", "files", "bytes", "writes"}.

    Raises:
        InputError: `out` holds other things, or was begun from other inputs.
        CheckFailed: a file is not what the manifest of its step says.
        ResourceError: the disk is full or too small.
    """
    require_uploadable(contents)
    copy = copy or read_only
    own = None if card is None else read_card(card)
    _refuse_inputs(contents, out)
    links = set() if copy else _on_disk_of(out, contents)
    if dry_run:
        sizes = {name: item.nbytes for name, item in contents.files.items()}
        writes = sum(size for name, size in sizes.items() if name not in links)
        return {"release": str(out), "files": sorted(sizes), "bytes": sum(sizes.values()), "writes": writes}
    identity = {
        "inputs": {n: i.identity for n, i in sorted(contents.files.items())},
        "options": {
            "name": name,
            "base_model": base_model,
            "license": license,
            "card": own and sha256(own.encode()).hexdigest(),
            "copy": copy,
            "piece": piece,
        },
    }
    if fresh and out.is_dir():
        _allow_writing(out)
    with ReleaseJob(out, "release build", identity, fresh=fresh, progress=progress) as job:
        if job.up_to_date:
            progress.say(f"{out} is up to date")
        else:
            _place_all(job, contents, links, piece, progress)
            facts = _facts(contents, identity, name=name, base_model=base_model, license=license)
            _write_rest(out, contents, facts, own, job.files)
            shutil.rmtree(job.state)
    seal = read_seal(out)
    if read_only:
        _forbid_writing(out)
    return {
        "release": str(out),
        "seal": seal.digest,
        "files": len(seal.files),
        "bytes": seal.nbytes,
        "linked": sum((out / n).stat().st_nlink > 1 for n in seal.files),
        "up_to_date": job.up_to_date,
        "read_only": read_only,
        "warnings": _warnings(seal.document, seal.files),
    }


def _refuse_inputs(contents: Contents, out: Path) -> None:
    """A release inside a directory with a manifest would be a stranger there, and the other way round."""
    items = [item for item in contents.files.values() if item.source is not None]
    listed = {item.source.parent for item in items if item.source and item.sha256 is not None}
    refuse_inputs(out, [*listed, *(item.source for item in items)])


def _on_disk_of(out: Path, contents: Contents) -> set[str]:
    """The files that lie on the file system of `out`, so that a link can be made."""
    existing = out.absolute()
    while not existing.exists():
        existing = existing.parent
    device = existing.stat().st_dev
    return {
        name for name, item in contents.files.items() if item.source and item.source.stat().st_dev == device
    }


def _place_all(job: ReleaseJob, contents: Contents, links: set[str], piece: int, progress: Progress) -> None:
    todo = {name: item for name, item in contents.files.items() if not _is_placed(job, name)}
    copies = sum(item.nbytes for name, item in todo.items() if name not in links)
    require_free_space(job.out, copies + _GENERATED)
    for folder in {(job.out / name).parent for name in todo}:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)

    def commit(name: str, record: SealedFile) -> None:
        written = (job.out / name).stat().st_mtime_ns
        job.commit(name, files={name: record}, result={"mtime_ns": written})

    spread(
        {name: partial(_place, item, job.out / name, name in links, piece) for name, item in todo.items()},
        commit,
        label="release",
        total=sum(item.nbytes for item in todo.values()),
        workers=settings.cpu_count(),
        progress=progress,
    )


def _is_placed(job: ReleaseJob, name: str) -> bool:
    """Whether an earlier call placed the file and nothing wrote to it since."""
    line = job.done.get(name)
    return line is not None and (job.out / name).stat().st_mtime_ns == line["result"]["mtime_ns"]


def _place(item: Item, target: Path, linked: bool, piece: int, advance: Advance) -> SealedFile:
    """Put one file in its place and hash it."""
    if item.data is not None:
        record = write_bytes(target, item.data)
        advance(len(item.data))
        return record
    assert item.source is not None
    if linked and _link(item.source, target):
        record = hash_file(target, advance, piece=piece)
    else:
        record = _copy(item.source, target, piece, advance)
    if item.sha256 not in (None, record.sha256):
        target.unlink()
        raise CheckFailed(
            f"is not what its step wrote: sha256 is {record.sha256[:12]}..., the manifest says {str(item.sha256)[:12]}...",
            where=item.source,
            remedy="make it again",
        )
    return record


def _link(source: Path, target: Path) -> bool:
    """Make a hard link; False where the file system or the kernel does not allow it."""
    with writing(target):
        target.unlink(missing_ok=True)
        try:
            os.link(source, target)
        except OSError as error:
            if error.errno in _NO_LINK:
                return False
            raise
        fsync_directory(target.parent)
    return True


def _copy(source: Path, target: Path, piece: int, advance: Advance) -> SealedFile:
    hasher = Hasher(source.stat().st_size, piece)
    with atomic_file(target) as out:
        for chunk in read_chunks(source, _CHUNK):
            out.write(chunk)
            hasher.update(memoryview(chunk))
            advance(len(chunk))
    return hasher.sealed()


def write_bytes(target: Path, data: bytes) -> SealedFile:
    """Write a small file atomically. Returns its record."""
    with atomic_file(target) as f:
        f.write(data)
    hasher = Hasher(len(data))
    hasher.update(memoryview(data))
    return hasher.sealed()


def _facts(
    contents: Contents,
    identity: Mapping[str, Any],
    *,
    name: str | None,
    base_model: str | None,
    license: str | None,
) -> dict[str, Any]:
    """What RELEASE.json says beside the files."""
    licence = contents.facts["licence"]
    if license is not None:
        licence = {**licence, "license": license, "license_name": None, "license_link": None, "given": True}
    return {
        "name": name or contents.name,
        "step": "release build",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "base_model": base_model,
        **contents.facts,
        "licence": licence,
        "sealed_with": {"q38": q38.__version__, "packages": installed_packages()},
        "identity": dict(identity),
        "piece_bytes": identity["options"]["piece"],
    }


def _write_rest(
    out: Path, contents: Contents, facts: Mapping[str, Any], own: str | None, placed: Mapping[str, Any]
) -> None:
    """The card, the hub's attributes, the sums, and last the seal."""
    files = {
        name: SealedFile(r["bytes"], r["sha256"], pieces=tuple(r.get("pieces", ())))
        for name, r in placed.items()
        if name in contents.files
    }
    text = own if own is not None else make_card(out, facts)
    files[CARD] = write_bytes(out / CARD, text.encode())
    files[ATTRIBUTES] = write_bytes(out / ATTRIBUTES, ATTRIBUTES_TEXT.encode())
    files[SUMS] = write_bytes(out / SUMS, sums_text(files))
    strangers = [n for n in files_below(out) if n not in files and n.partition("/")[0] != STATE]
    if strangers:
        raise InputError(
            f"holds files that are no part of the release: {', '.join(strangers[:SHOWN])}",
            where=out,
            remedy="move them away and give the command again",
        )
    listing = {name: record.to_dict() for name, record in sorted(files.items())}
    write_seal(out, {**facts, "files": listing})


def _warnings(facts: Mapping[str, Any], files: Mapping[str, SealedFile]) -> list[str]:
    """What a reader of the release would miss."""
    found = []
    if facts["licence"]["license"] is None:
        found.append("the source checkpoint names no licence; give one with --license")
    if facts["base_model"] is None:
        found.append("the card names no base model; give its hub name with --base-model")
    found += [f"no {kind} report" for kind in ("quality", "speed") if kind not in facts["reports"]]
    found += [
        f"{name} has {record.bytes / 1e9:.0f} GB; the hub recommends less than {LARGE_FILE / 1e9:.0f}"
        for name, record in files.items()
        if record.bytes > LARGE_FILE
    ]
    return found


def _forbid_writing(out: Path) -> None:
    for path in [*files_below(out).values(), *(p for p in out.rglob("*") if p.is_dir()), out]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) & ~0o222)


def _allow_writing(out: Path) -> None:
    for path in [out, *(p for p in out.rglob("*") if p.is_dir())]:
        path.chmod(stat.S_IMODE(path.stat().st_mode) | stat.S_IWUSR)
