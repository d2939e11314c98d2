"""Rows that were read before, in a fixed amount of memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np
from numpy.typing import NDArray

_MIX = np.uint64(0x9E3779B97F4A7C15)  # of splitmix64: spreads consecutive ids


class RowCache:
    """A direct-mapped cache: a row has one slot, and the last row put there stays.

    Args:
        slots: rounded up to a power of two.
        width: bytes of a row.

    Attributes:
        lock: held while rows are put, for a reader on another thread.
    """

    lock: AbstractContextManager[None] = nullcontext()

    def __init__(self, slots: int, width: int) -> None:
        self._bits = np.uint64(64 - max(slots - 1, 1).bit_length())
        size = 1 << (64 - int(self._bits))
        self._ids = np.full(size, -1, np.int64)
        self._rows = np.zeros((size, width), np.uint8)

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        return self._ids.nbytes + self._rows.nbytes

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the ids and of the rows, and the shift that makes a slot of a hash: what fetch_rows.c looks rows up by."""
        return self._ids.ctypes.data, self._rows.ctypes.data, int(self._bits)

    def get(self, ids: NDArray[np.int64], out: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Copy the rows that are there to their places in `out` [n, width]; bool [n]: which."""
        slots = self._slots(ids)
        found: NDArray[np.bool_] = self._ids[slots] == ids
        out[found] = self._rows[slots[found]]
        return found

    def put(self, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Keep rows. Of two with one slot the later stays."""
        slots, last = np.unique(self._slots(ids)[::-1], return_index=True)
        kept = len(ids) - 1 - last
        with self.lock:
            self._rows[slots] = rows[kept]
            self._ids[slots] = ids[kept]

    def _slots(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ((ids.astype(np.uint64) * _MIX) >> self._bits).astype(np.int64)


class RecentRows:
    """The rows put there last, for a few ids at a time: what plain Python finds faster than arrays do.

    Args:
        rows: how many it keeps.
        width: bytes of a row.
    """

    def __init__(self, rows: int, width: int) -> None:
        self._rows = np.zeros((rows, width), np.uint8)
        self._ids = [-1] * rows
        self._slots: dict[int, int] = {}
        self._next = 0

    def get(self, ids: list[int], out: NDArray[np.uint8]) -> list[int]:
        """Copy the rows that are there to their places in `out` [n, width]; the places of the others."""
        slots = [self._slots.get(i, -1) for i in ids]
        out[:] = self._rows[slots]  # a wrong row where there is none; the caller fills it
        return [place for place, slot in enumerate(slots) if slot < 0]

    def put(self, ids: list[int], rows: NDArray[np.uint8]) -> None:
        """Keep rows in place of the oldest."""
        for i, row in zip(ids, rows, strict=True):
            if i not in self._slots:
                self._slots.pop(self._ids[self._next], None)
                self._slots[i], self._ids[self._next] = self._next, i
                self._rows[self._next] = row
                self._next = (self._next + 1) % len(self._ids)
