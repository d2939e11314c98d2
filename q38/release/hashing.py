"""sha256 of whole files and of their pieces.

Pieces let many cores hash one large file, let a check read a sample of it, and tell where a file differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.checkpoint.writer import FileRecord

PIECE = 64 * 2**20  # bytes of a piece; the last one of a file may be shorter
_CHUNK = 2**20  # bytes in hand at a time: what was read is hashed while it is in the cache


@dataclass(frozen=True)
class SealedFile(FileRecord):
    """One file of a release. `pieces`: sha256 of each piece; empty where one piece holds the whole file."""

    pieces: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        base = {"bytes": self.bytes, "sha256": self.sha256}
        return {**base, "pieces": list(self.pieces)} if self.pieces else base

    def ranges(self, piece: int) -> list[tuple[int, int, str]]:
        """(start, stop, sha256) of the pieces that cover the file."""
        if not self.pieces:
            return [(0, self.bytes, self.sha256)]
        return [(i * piece, min((i + 1) * piece, self.bytes), digest) for i, digest in enumerate(self.pieces)]


class Hasher:
    """Hashes a file of `size` bytes, whole and by piece, as it is fed from its start."""

    def __init__(self, size: int, piece: int = PIECE) -> None:
        self._whole = hashlib.sha256()
        self._by_piece = size > piece
        self._piece, self._left, self._current = piece, piece, hashlib.sha256()
        self._pieces: list[str] = []
        self._bytes = 0

    def update(self, data: memoryview) -> None:
        self._whole.update(data)
        self._bytes += len(data)
        while self._by_piece and len(data):
            part = data[: self._left]
            self._current.update(part)
            self._left -= len(part)
            if not self._left:
                self._next()
            data = data[len(part) :]

    def sealed(self) -> SealedFile:
        """The record of what was fed. Call once, at the end."""
        if self._by_piece and self._left < self._piece:
            self._next()
        return SealedFile(self._bytes, self._whole.hexdigest(), pieces=tuple(self._pieces))

    def _next(self) -> None:
        self._pieces.append(self._current.hexdigest())
        self._left, self._current = self._piece, hashlib.sha256()


def hash_file(file: Path, advance: Callable[[int], None], *, piece: int = PIECE) -> SealedFile:
    """Hash a whole file. `advance` is told the bytes done. Raises OSError."""
    hasher = Hasher(file.stat().st_size, piece)
    buffer = memoryview(bytearray(_CHUNK))
    with file.open("rb", buffering=0) as f:
        while n := f.readinto(buffer):
            hasher.update(buffer[:n])
            advance(n)
    return hasher.sealed()


def hash_range(file: Path, start: int, stop: int, advance: Callable[[int], None]) -> str:
    """sha256 of the bytes [start, stop) of a file, or of fewer where it ends before. Raises OSError."""
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK, max(stop - start, 1))))
    with file.open("rb", buffering=0) as f:
        while start < stop:
            n = os.preadv(f.fileno(), [buffer[: stop - start]], start)
            if n == 0:
                break
            digest.update(buffer[:n])
            start += n
            advance(n)
    return digest.hexdigest()
