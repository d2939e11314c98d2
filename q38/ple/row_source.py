"""Rows of a split n-gram table for a server: cached, read in parallel, ahead of use, and counted.

Where the table is one file on a disk that takes direct reads, nothing enters the page cache: rows are read by
`aio.AioQueue` and the row caches are all the memory it takes. Elsewhere the rows come through the page cache.

Rows that prompts bring have a cache of their own, so that a long text cannot evict what decoding reads again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.ple.aio import AioQueue
from q38.ple.reader import PleTable
from q38.ple.row_cache import RecentRows, RowCache

DECODE_ROWS, PROMPT_SLOTS = 2**17, 2**18


@dataclass
class RowCounts:
    """Since the start. wait_s: seconds that steps waited for their rows; ahead: rows that were read before they were asked for."""

    rows: int = 0
    hits: int = 0
    ahead: int = 0
    wait_s: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class RowSource:
    """`rows` and `few` serve one thread; `read_ahead` works on a thread of its own.

    Args:
        direct: read past the page cache where the disk can.
    """

    def __init__(self, table: PleTable, *, direct: bool = True) -> None:
        self.table, self.counts = table, RowCounts()
        self.prompt = RowCache(PROMPT_SLOTS, table.row_bytes)
        self._queues = [
            _queue(table, direct=direct) for _ in range(2)
        ]  # of the steps, and of what is read ahead
        self._ahead: _Ahead | None = None

    @cached_property
    def decode(self) -> RecentRows:
        """Rows of decode steps. Made by the first `few`: a server whose steps fetch their own rows never calls it."""
        return RecentRows(DECODE_ROWS, self.table.row_bytes)

    @property
    def direct(self) -> bool:
        """Whether reads go past the page cache."""
        return self._queues[0] is not None

    def rows(self, ids: NDArray[np.int64]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Stored rows of a prompt: uint8 [unique, row_bytes], and for each id its place among them.

        Args:
            ids: int64 [n], repeats allowed; each is read once.

        Raises:
            ValueError: an id is outside the table. InputError: the disk fails.
        """
        begun = time.perf_counter()
        unique, inverse = np.unique(ids, return_inverse=True)
        self._check(unique[:1].tolist() + unique[-1:].tolist())
        out = np.empty((len(unique), self.table.row_bytes), np.uint8)
        missing = ~self.prompt.get(unique, out)
        hits = int(len(unique) - missing.sum())
        ahead = self._take_ahead(unique, out, missing)
        missing &= ~ahead
        if missing.any():
            out[missing] = self._read(0, unique[missing])
        fresh = missing | ahead
        self.prompt.put(unique[fresh], out[fresh])
        self._count(len(ids), hits + len(ids) - len(unique), int(ahead.sum()), begun)
        return out, inverse

    def few(self, ids: list[int]) -> NDArray[np.uint8]:
        """Stored rows of a decode step, in the order of the ids: uint8 [n, row_bytes].

        Raises:
            as `rows`.
        """
        begun = time.perf_counter()
        self._check((min(ids), max(ids)))
        out = np.empty((len(ids), self.table.row_bytes), np.uint8)
        absent = self.decode.get(ids, out)
        if absent:
            wanted = np.array([ids[place] for place in absent])
            found = np.empty((len(absent), out.shape[1]), np.uint8)
            missing = ~self.prompt.get(wanted, found)
            if missing.any():
                unique, inverse = np.unique(wanted[missing], return_inverse=True)
                found[missing] = self._read(0, unique)[inverse]
            out[absent] = found
            self.decode.put(wanted.tolist(), found)
            self._count(len(ids), len(ids) - int(missing.sum()), 0, begun)
        else:
            self._count(len(ids), len(ids), 0, begun)
        return out

    def read_ahead(self, ids: NDArray[np.int64]) -> None:
        """Start reading rows that the next prompt step will ask for; returns at once. A call before is waited for."""
        self._finish_ahead()
        self._ahead = _Ahead(self, ids)

    def close(self) -> None:
        """Wait for reads and close the files."""
        self._finish_ahead()
        for queue in filter(None, self._queues):
            queue.close()
        self.table.close()

    def _check(self, ends: Sequence[int]) -> None:
        for row in ends:
            if not 0 <= row < self.table.num_rows:
                raise ValueError(f"row {row} of a table of {self.table.num_rows} rows")

    def _count(self, rows: int, hits: int, ahead: int, begun: float) -> None:
        counts = self.counts
        counts.rows += rows
        counts.hits += hits
        counts.ahead += ahead
        counts.wait_s += time.perf_counter() - begun

    def _take_ahead(
        self, ids: NDArray[np.int64], out: NDArray[np.uint8], wanted: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        found = np.zeros(len(ids), bool)
        ahead = self._finish_ahead()
        if ahead is not None and len(ahead.ids):
            places = np.flatnonzero(wanted)
            at = np.minimum(np.searchsorted(ahead.ids, ids[places]), len(ahead.ids) - 1)
            got = ahead.ids[at] == ids[places]
            out[places[got]] = ahead.rows[at[got]]
            found[places[got]] = True
        return found

    def _finish_ahead(self) -> _Ahead | None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.thread.join()
            if ahead.error is not None:
                raise ahead.error
        return ahead

    def _read(self, queue: int, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        direct = self._queues[queue]
        if direct is None:
            return self.table.stored(ids)
        return direct.read(ids * self.table.row_bytes, self.table.row_bytes)


class _Ahead:
    """Rows on their way, ids ascending."""

    def __init__(self, source: RowSource, ids: NDArray[np.int64]) -> None:
        self.ids, self.rows, self.error = np.unique(ids), np.empty((0, 0), np.uint8), None
        self.thread = threading.Thread(target=self._run, args=(source,), name="q38-rows-ahead", daemon=True)
        self.thread.start()

    error: BaseException | None

    def _run(self, source: RowSource) -> None:
        try:
            self.rows = source._read(1, self.ids)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that asks for the rows
            self.error = error


def _queue(table: PleTable, *, direct: bool) -> AioQueue | None:
    if not direct or table.file is None:
        return None
    try:
        return AioQueue(table.file)
    except OSError:  # no native AIO, or a file system without direct reads
        return None
