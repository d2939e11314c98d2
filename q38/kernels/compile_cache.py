"""Compiled kernels on disk, so that only the first process on a machine waits for the compiler.

One file per kernel source, options and compiler: DIR/<sha256 of all that>.cubin (or .so), the sha256 of the machine
code before the machine code itself. A damaged file counts as absent and is written again. A directory that
cannot be written, or that others may write to, is left alone: then every process compiles.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

_DIGEST = hashlib.sha256().digest_size


def cache_key(parts: Sequence[bytes]) -> str:
    """Name of what `parts` compile to: sha256 over each part and its length."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def cached(directory: Path, key: str, compile_: Callable[[], bytes], *, suffix: str = ".cubin") -> bytes:
    """What `compile_` returns, from DIR/<key><suffix> where an earlier process left it.

    Errors of `compile_` pass through; those of the disk do not.
    """
    if not _usable(directory):
        return compile_()
    file = directory / f"{key}{suffix}"
    if (found := _read(file)) is not None:
        return found
    code = compile_()
    _write(file, code)
    return code


def _usable(directory: Path) -> bool:
    """Whether the directory is there, or can be made, and only this user can write to it: its files are run."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _read(file: Path) -> bytes | None:
    try:
        data = file.read_bytes()
    except OSError:
        return None
    code = data[_DIGEST:]
    return code if code and hashlib.sha256(code).digest() == data[:_DIGEST] else None


def _write(file: Path, code: bytes) -> None:
    """Under a name of its own, then renamed: processes that compile at the same time do not meet."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=file.parent, suffix=".part", delete=False) as out:
            temporary = Path(out.name)
            out.write(hashlib.sha256(code).digest() + code)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(file)
    except OSError:  # a full or read-only disk costs the next process a compilation
        if temporary is not None:
            temporary.unlink(missing_ok=True)
