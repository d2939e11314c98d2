"""Where every expert row lies, and how rows move without ever being unreadable.

Each row lies in exactly one slot, of the device arena or of the pinned host pool, and the address
table points at it. A move is copy, fence, table, fence, release:

    copy      the rows are copied to free slots on a stream of their own; kernels go on reading the old ones
    fence     until the copies have finished
    table     the new addresses are uploaded on the stream of the kernels
    fence     until everything enqueued there before has finished: no kernel can still hold an old address
    release   the old slots become free; only now may they be written or unmapped

So a captured graph that replays before, between or after the steps always reads a valid row.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import ResourceError
from q38.residency.arena import Arena
from q38.residency.driver import Addresses, CudaError, Driver
from q38.residency.pool import HostPool, Index, Slots, take_places
from q38.residency.table import AddressTable

Mask = NDArray[np.bool_]


class _State(Enum):
    UNDOING = auto()  # copies may be under way, and their targets are to be released
    COPYING = auto()
    SWITCHING = auto()  # the table is rewritten; the old slots are held until the fence


@dataclass
class _Move:
    rows: Index
    old: Index
    new: Index
    state: _State = _State.UNDOING
    fenced: bool = False


class RowStore:
    """All rows of all layers. Row number = layer * experts + expert.

    `place` holds one int64 per row: device slot s as s, host slot s as -1 - s.

    Args:
        stream: the stream that kernels read rows on. Call from one thread, at points where no other
            stream reads rows.
        resident: bool [layers, experts]: which rows start in device memory.

    Raises:
        ResourceError: the rows do not fit the arena and the pool.
    """

    def __init__(
        self,
        driver: Driver,
        pool: HostPool,
        arena: Arena,
        table: AddressTable,
        *,
        stream: int,
        resident: Mask,
    ) -> None:
        self.driver, self.pool, self.arena, self.table, self.stream = driver, pool, arena, table, stream
        self.row_bytes = pool.row_bytes
        self.rows = table.layers * table.experts
        self.device = Slots(self.rows, 0, name="device slots")
        self._move: _Move | None = None
        self._copies = driver.new_stream()
        self._copied, self._switched = driver.new_event(), driver.new_event()
        flat = resident.reshape(-1)
        self.back(int(flat.sum()))
        self.place: Index = self._take(flat)

    @property
    def on_device(self) -> Mask:
        """bool [rows]."""
        return self.place >= 0

    @property
    def idle(self) -> bool:
        """Whether no move is under way."""
        return self._move is None

    def addresses(self, places: Index) -> Addresses:
        """int64: the address that kernels read each place at."""
        return np.where(
            places >= 0,
            self.arena.base + places * self.row_bytes,
            self.pool.device_address + (-1 - places) * self.row_bytes,
        )

    def publish(self) -> None:
        """Point the whole table at the rows' places; once, after loading."""
        everything = np.arange(self.rows)
        self.table.rewrite(everything, self.addresses(self.place), self.stream)
        self.driver.synchronize(self.stream)

    def refuse_capture(self) -> None:
        """Raise ResourceError while a graph is being captured: the calls of a move would end up in it."""
        if self.driver.capturing(self.stream):
            raise ResourceError(
                "a CUDA graph is being captured", where="expert rows", remedy="move rows between captures"
            )

    def move(self, rows: Index, to_device: Mask) -> None:
        """Move rows and wait until their old slots are free.

        Args:
            rows: row numbers, each once.
            to_device: bool, the side each row goes to; a row may move within its side.

        Raises:
            ResourceError: too few free slots, or capture; nothing has moved.
            CudaError: nothing has moved, unless the last fence failed: then the rows have moved, and
                the next `settle` frees their old slots.
        """
        self.begin(rows, to_device)
        try:
            self.settle()
        except CudaError:
            if self._move and self._move.state is _State.COPYING:
                self._move.state = _State.UNDOING
                with suppress(CudaError):
                    self.settle()
            raise

    def begin(self, rows: Index, to_device: Mask) -> None:
        """Start copying rows and return; `poll` at later safe points completes the move.

        Raises:
            ResourceError, CudaError: as `move`; ValueError: another move is under way.
        """
        if self._move is not None:
            raise ValueError("another move is under way")
        self.refuse_capture()
        new = self._take(to_device)
        move = self._move = _Move(rows, self.place[rows], new)
        try:
            self.driver.copy(self.addresses(new), self.addresses(move.old), self.row_bytes, self._copies)
            self.driver.record(self._copied, self._copies)
        except CudaError:
            with suppress(CudaError):
                self.settle()
            raise
        move.state = _State.COPYING

    def poll(self) -> bool:
        """Take the next step of a move if it can be taken without waiting. True when none is under way."""
        move = self._move
        if move is None:
            return True
        if self.driver.capturing(self.stream):
            return False
        if move.state is _State.UNDOING:
            self.settle()
            return True
        if move.state is _State.COPYING:
            if not self.driver.done(self._copied):
                return False
            self._switch(move)
        if not move.fenced:
            self.driver.record(self._switched, self.stream)
            move.fenced = True
        if not self.driver.done(self._switched):
            return False
        self._release(move.old)
        return True

    def settle(self) -> None:
        """Complete the move under way, or undo one that failed, and wait for it.

        Raises:
            CudaError: the move stays under way; call again.
        """
        move = self._move
        if move is None:
            return
        if move.state is _State.UNDOING:
            self.driver.synchronize(self._copies)
            self._release(move.new)
            return
        if move.state is _State.COPYING:
            self.driver.wait(self._copied)
            self._switch(move)
        self.driver.synchronize(self.stream)
        self._release(move.old)

    def back(self, rows: int) -> None:
        """Back at least `rows` device slots.

        Raises:
            OutOfMemory: the arena is as it was.
        """
        self.arena.grow_to(min(rows, self.rows) * self.row_bytes)
        self._limit_device(self.arena.backed)

    def trim(self, rows: int) -> None:
        """Give memory beyond `rows` device slots back to the driver; rows that lie there move down first.

        Raises:
            CudaError: rows or chunks may be left where they were; call again.
        """
        target = -(-rows * self.row_bytes // self.arena.chunk) * self.arena.chunk
        if self.arena.committed <= target:
            return
        self.refuse_capture()
        self._limit_device(min(target, self.arena.backed))
        tail = np.flatnonzero(self.place >= self.device.usable)
        try:
            if len(tail):
                self.move(tail, np.ones(len(tail), bool))
        except ResourceError:
            self._limit_device(self.arena.backed)
            raise
        self.arena.shrink_to(target)

    def close(self) -> None:
        """Wait for everything, then free the table, the arena and the pool."""
        self.settle()
        self.driver.synchronize(self._copies)
        self.driver.synchronize(self.stream)
        self.table.close()
        self.arena.close()
        self.pool.close()

    def _limit_device(self, nbytes: int) -> None:
        self.device.usable = min(self.rows, nbytes // self.row_bytes)

    def _take(self, to_device: Mask) -> Index:
        """A free slot for each entry, all or none."""
        return take_places(to_device, self.device, self.pool.slots)

    def _switch(self, move: _Move) -> None:
        self.table.rewrite(move.rows, self.addresses(move.new), self.stream)
        self.place[move.rows] = move.new
        move.state = _State.SWITCHING

    def _release(self, places: Index) -> None:
        self.device.give(places[places >= 0])
        self.pool.slots.give(-1 - places[places < 0])
        self._move = None
