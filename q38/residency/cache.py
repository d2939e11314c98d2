"""The elastic expert cache: how many rows, and which, lie in device memory.

Every change happens at a safe point between steps and moves rows in batches. `heat` ranks the rows;
any number that grows with how often a row is read will do (expected selections per token).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import ResourceError
from q38.base.progress import SILENT, Progress
from q38.base.units import GIB, format_bytes
from q38.residency.arena import CHUNK, Arena
from q38.residency.driver import CudaError, Driver, OutOfMemory
from q38.residency.heat import hottest
from q38.residency.pool import HostLimits, HostPool, Index, Slots, pool_bytes, take_places
from q38.residency.shared import SharedMemory
from q38.residency.store import Mask, RowStore
from q38.residency.table import ENTRY, AddressTable

Heat = NDArray[np.floating[Any]]


class ExpertCache:
    """Grows, shrinks and refills the rows in device memory.

    Args:
        store: the rows.
        heat: [layers, experts], how often each row is expected to be read.
        spare: slots kept free on both sides, so that rows can be exchanged.

    Every method raises ResourceError during graph capture, and CudaError when the driver fails; what
    had moved by then stays moved, every row stays readable, and the next call goes on from there.
    """

    def __init__(self, store: RowStore, heat: Heat, *, spare: int) -> None:
        self.store, self.spare = store, spare
        self.layers, self.experts = store.table.layers, store.table.experts
        self.set_heat(heat)

    @property
    def resident(self) -> Mask:
        """bool [layers, experts]: which rows lie in device memory."""
        return self.store.on_device.reshape(self.layers, self.experts)

    @property
    def budgets(self) -> Index:
        """int64 [layers]: rows of each layer in device memory."""
        budgets: Index = np.count_nonzero(self.resident, axis=1)
        return budgets

    def set_heat(self, heat: Heat) -> None:
        """Replace the ranking; moves nothing.

        Raises:
            ValueError: not [layers, experts], or not finite.
        """
        if heat.shape != (self.layers, self.experts) or not np.isfinite(heat).all():
            raise ValueError(
                f"heat must be finite and [{self.layers}, {self.experts}], not {list(heat.shape)}"
            )
        self.heat = heat.astype(np.float64).reshape(-1)

    def set_budgets(self, budgets: Index) -> None:
        """Hold the `budgets[l]` hottest rows of each layer l in device memory.

        Raises:
            ResourceError: the rows left over do not fit the pool, or no memory is left on the device.
            ValueError: a budget is negative or above the number of experts.
        """
        if len(budgets) != self.layers or (budgets < 0).any() or (budgets > self.experts).any():
            raise ValueError(f"budgets must be {self.layers} numbers from 0 to {self.experts}")
        self.set_resident(hottest(self.heat.reshape(self.layers, self.experts), budgets))

    def set_resident(self, resident: Mask) -> None:
        """Hold exactly these rows in device memory.

        Args:
            resident: bool [layers, experts].

        Raises:
            ResourceError: as `set_budgets`; nothing has moved.
        """
        self._ready()
        target, now = resident.reshape(-1), self.store.on_device
        promote = self._hottest(target & ~now)
        demote = self._hottest(~target & now)[::-1]
        count = int(target.sum())
        self._check_room(count)
        try:
            self.store.back(max(count + self.spare, self.store.device.used))
            self._exchange(promote, demote)
        except ResourceError:
            with suppress(ResourceError):
                self._trim()
            raise
        self._trim()

    def grow(self, rows: int) -> None:
        """Bring the `rows` hottest host rows into device memory, of whatever layer.

        Raises:
            ResourceError: fewer rows are on the host.
            OutOfMemory: nothing has moved and no memory was taken.
        """
        self._resize(self._hottest(~self.store.on_device), rows, to_device=True)

    def shrink(self, rows: int) -> None:
        """Move the `rows` coldest device rows to the host and give their memory back.

        Raises:
            ResourceError: fewer rows are on the device, or the pool lacks slots; nothing has moved.
        """
        self._resize(self._hottest(self.store.on_device)[::-1], rows, to_device=False)

    def fill(self, reserve: int) -> int:
        """Grow into free device memory, leaving `reserve` bytes of it.

        Memory that torch caches does not count as free: empty its cache first.

        Returns:
            rows brought in; 0 when nothing is free.
        """
        self._ready()
        arena, row_bytes = self.store.arena, self.store.row_bytes
        room = max(self.store.driver.memory()[0] - reserve, 0) // arena.chunk * arena.chunk
        rows = (arena.backed + room) // row_bytes - self.spare - self.store.device.used
        rows = min(rows, int((~self.store.on_device).sum()))
        while rows > 0:
            try:
                self.grow(rows)
            except OutOfMemory:  # another process was faster
                rows //= 2
            else:
                return rows
        return 0

    def free(self, nbytes: int) -> int:
        """Give at least `nbytes` of device memory back to the driver, or what the pool has room for.

        Returns:
            bytes given back, whole chunks; may be 0. The caller decides whether that is enough.
        """
        self._ready()
        arena = self.store.arena
        before, chunks = arena.committed, -(-nbytes // arena.chunk)
        target = max(before - chunks * arena.chunk, 0)
        surplus = self.store.device.used - max(target // self.store.row_bytes - self.spare, 0)
        room = max(self.store.pool.slots.free - self.spare, 0)
        if (rows := min(surplus, room)) > 0:
            self.shrink(rows)
        else:
            self._trim()
        return before - arena.committed

    def begin_swaps(self, promote: Index, demote: Index) -> int:
        """Start exchanging rows one for one and return; `poll` completes it at later safe points.

        Args:
            promote: row numbers on the host. demote: row numbers on the device, as many.

        Returns:
            how many pairs were started, at most the free slots of either side; 0 while a move is under way.
        """
        store = self.store
        if not store.poll():
            return 0
        n = min(len(promote), len(demote), store.device.free, store.pool.slots.free)
        if n:
            to_device = np.arange(2 * n) < n
            store.begin(np.concatenate([promote[:n], demote[:n]]), to_device)
        return n

    def poll(self) -> bool:
        """Advance a started exchange without waiting. True when none is under way."""
        return self.store.poll()

    def status(self) -> dict[str, Any]:
        """Counts and bytes, for logs and for a control interface."""
        store, arena, pool = self.store, self.store.arena, self.store.pool
        total = float(self.heat.sum())
        return {
            "rows_on_device": int(store.on_device.sum()),
            "rows_on_host": int((~store.on_device).sum()),
            "rows_per_layer": self.budgets.tolist(),
            "expected_hit_rate": float(self.heat[store.on_device].sum()) / total if total else 0.0,
            "device_bytes": arena.committed,
            "device_bytes_wasted": arena.committed - store.device.used * store.row_bytes,
            "device_slots_free": store.device.free,
            "host_bytes_requested": pool.requested,
            "host_bytes_pinned": pool.pinned,
            "host_slots_free": pool.slots.free,
        }

    def close(self) -> None:
        """Wait for everything and free all memory."""
        self.store.close()

    def _ready(self) -> None:
        self.store.refuse_capture()
        self.store.settle()

    def _hottest(self, mask: Mask) -> Index:
        """Row numbers in `mask`, hottest first."""
        rows = np.flatnonzero(mask)
        return rows[np.argsort(-self.heat[rows], kind="stable")]

    def _resize(self, candidates: Index, rows: int, *, to_device: bool) -> None:
        self._ready()
        if not 0 <= rows <= len(candidates):
            side = "host" if to_device else "device"
            raise ResourceError(
                f"{rows} rows to move, {len(candidates)} are on the {side}",
                where="expert cache",
                remedy="move fewer rows",
            )
        target = self.store.on_device
        target[candidates[:rows]] = to_device
        self.set_resident(target.reshape(self.layers, self.experts))

    def _check_room(self, on_device: int) -> None:
        slots = self.store.pool.slots
        other = slots.used - int((~self.store.on_device).sum())  # lent out, for example to the loader
        missing = self.store.rows - on_device - (slots.usable - other)
        if missing > 0:
            raise ResourceError(
                f"{self.store.rows - on_device} rows would be on the host, it holds {slots.usable - other}: {missing} short "
                f"({format_bytes(missing * self.store.row_bytes)} of pinned memory)",
                where="expert cache",
                remedy=f"keep at least {on_device + missing} rows in VRAM",
            )

    def _exchange(self, promote: Index, demote: Index) -> None:
        """Both directions at once, in as few rounds as the free slots allow."""
        store = self.store
        while len(promote) or len(demote):
            up = min(len(promote), store.device.free)
            down = min(len(demote), store.pool.slots.free)
            rows = np.concatenate([promote[:up], demote[:down]])
            if not len(rows):  # only ever in the first round: each round frees slots for the next
                raise ResourceError(
                    "no slot is free to exchange rows through",
                    where="expert cache",
                    remedy="start with spare slots",
                )
            store.move(rows, np.arange(len(rows)) < up)
            promote, demote = promote[up:], demote[down:]

    def _trim(self) -> None:
        self.store.settle()
        self.store.trim(min(self.store.device.used + self.spare, self.store.rows))


@dataclass(frozen=True)
class PoolPlan:
    """A host pool before there is one.

    slots: row slots. scratch: bytes beside them. places: int64 [rows], where each row goes first, in the words of
        `RowStore.place`.
    """

    row_bytes: int
    slots: int
    scratch: int
    places: Index

    @property
    def nbytes(self) -> int:
        """Bytes of the pool."""
        return pool_bytes(self.row_bytes, self.slots, self.scratch)


def plan_pool(
    row_bytes: int, resident: Mask, *, fewest: int | None, spare: int, scratch: int = 0
) -> PoolPlan:
    """What `open_cache` pins for these arguments, and where it puts the rows."""
    total, count = resident.size, int(resident.sum())
    slots = total - (count if fewest is None else min(fewest, count)) + spare
    places = take_places(resident.reshape(-1), Slots(total), Slots(slots))
    return PoolPlan(row_bytes, slots, total * ENTRY + scratch, places)


def open_cache(
    driver: Driver,
    row_bytes: int,
    resident: Mask,
    heat: Heat,
    *,
    stream: int,
    fewest: int | None = None,
    spare: int = 16,
    scratch: int = 0,
    chunk: int = CHUNK,
    limits: HostLimits | None = None,
    keep: int = GIB,
    threads: int | None = None,
    progress: Progress = SILENT,
    shared: SharedMemory | None = None,
) -> ExpertCache:
    """Pin the pool, back the arena and give every row a place. Fill the rows, then call `store.publish`.

    Args:
        row_bytes: bytes of one row (`ExpertLayout.row_bytes`), a multiple of 8.
        resident: bool [layers, experts], the rows that start in device memory.
        heat: [layers, experts], the ranking.
        stream: the stream that kernels read rows on.
        fewest: the lowest number of rows that will ever be in device memory; the pool holds the rest.
            By default the number of resident rows: then `shrink` and `free` can give nothing back.
        spare: slots kept free on both sides for exchanging rows.
        scratch: pinned bytes for others (readings of counters), beside the table's own.
        limits, keep, threads, shared: see `HostPool`.

    Raises:
        ResourceError: host or device memory is short; nothing stays allocated.
    """
    layers, experts = resident.shape
    total, count = layers * experts, int(resident.sum())
    plan = plan_pool(row_bytes, resident, fewest=fewest, spare=spare, scratch=scratch)
    pool = HostPool(
        driver,
        row_bytes,
        plan.slots,
        scratch=plan.scratch,
        limits=limits,
        keep=keep,
        threads=threads,
        progress=progress,
        shared=shared,
    )
    arena = table = None
    try:
        arena = Arena(driver, total * row_bytes, chunk=chunk)
        table = AddressTable(driver, pool, layers, experts)
        store = RowStore(driver, pool, arena, table, stream=stream, resident=resident)
        store.back(count + spare)
        return ExpertCache(store, heat, spare=spare)
    except BaseException:
        for part in (table, arena, pool):
            if part is not None:
                with suppress(CudaError):
                    part.close()
        raise
