"""Load the experts of a packed checkpoint into their rows.

The packed tensors already are a row's parts, so loading is reading and placing: no transposition and
no second copy of the model. Several threads each read a unit (a few experts) into a buffer of their
own and place it: a host row directly in its slot, a device row in one of two borrowed pinned slots,
from where it is copied on while the next is placed.
"""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from q38.base.errors import ResourceError
from q38.base.progress import SILENT, Progress, Task
from q38.checkpoint.index import Checkpoint
from q38.residency.layout import ExpertLayout
from q38.residency.placing import Placing
from q38.residency.pool import Bytes, Index
from q38.residency.reader import FileReader, aligned, room
from q38.residency.shards import UNIT, ReadPlan, Unit, plan_reads
from q38.residency.store import RowStore

READERS = 8  # threads; two requests or more in flight saturate every disk seen
_STAGING = 2  # pinned slots per reader: one is placed while the other is copied to the device


@dataclass(frozen=True)
class LoadReport:
    """What was loaded. Bytes read include the zero points, which rows do not keep."""

    rows: int
    nbytes: int
    seconds: float
    readers: int
    direct_files: int
    files: int
    scale_dtype: str

    @property
    def gb_per_second(self) -> float:
        return self.nbytes / max(self.seconds, 1e-9) / 1e9

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "gb_per_second": self.gb_per_second}


class Target(Protocol):
    """Where rows go. Called by several threads."""

    def take(self, row: int, reader: int) -> Bytes:
        """uint8 [row_bytes]: memory to assemble a row in. May wait until there is some."""

    def give(self, row: int, reader: int) -> None:
        """The row is complete."""

    def stop(self) -> None:
        """A reader has failed: nobody may go on waiting."""


def load_rows(
    checkpoint: Checkpoint,
    layout: ExpertLayout,
    store: RowStore,
    *,
    plan: ReadPlan | None = None,
    readers: int = READERS,
    unit: int = UNIT,
    direct: bool | None = None,
    progress: Progress = SILENT,
) -> LoadReport:
    """Fill every row of `store` from `checkpoint`, check it, and publish the address table.

    Takes at most `readers` x (unit + one expert) bytes of memory beside the rows.

    Args:
        plan: what `plan_reads` found, or part of it; made here where it is not given.
        readers: threads; fewer when the pool has less than two free slots for each.
        unit: bytes that one thread reads at once.
        direct: force or forbid O_DIRECT; None decides file by file.

    Raises:
        InputError: a tensor is missing, misshapen, asymmetric, not finite in its scales, or cut short.
        ResourceError: the pool has no two free slots, or CUDA fails.
        ValueError: the store's rows are not the layout's.
    """
    if store.row_bytes != layout.row_bytes:
        raise ValueError(f"rows of {store.row_bytes} bytes for a layout of {layout.row_bytes}")
    plan = plan or plan_reads(checkpoint, layout, unit=unit)
    readers = min(readers, len(plan.groups), store.pool.slots.free // _STAGING)
    if readers < 1:
        raise ResourceError(
            f"{_STAGING} free slots needed to load through, {store.pool.slots.free} are free",
            where="host pool",
            remedy="start with more spare slots",
        )
    slots = store.pool.slots.take(readers * _STAGING)
    try:
        target = _StoreTarget(store, slots.reshape(readers, _STAGING))
        try:
            report = fill_rows(plan, layout, target, readers=readers, direct=direct, progress=progress)
        finally:
            target.finish()
    finally:
        store.pool.slots.give(slots)
    store.publish()
    return report


def fill_rows(
    plan: ReadPlan,
    layout: ExpertLayout,
    target: Target,
    *,
    readers: int = READERS,
    direct: bool | None = None,
    progress: Progress = SILENT,
) -> LoadReport:
    """Read the rows of `plan` and hand each to `target`, complete and checked.

    Raises:
        as `load_rows`, and what `target` raises.
    """
    started = time.monotonic()
    with ExitStack() as stack:
        files: dict[Path, FileReader] = {}
        for file in plan.files:
            files[file] = FileReader(file, direct=direct)
            stack.callback(files[file].close)
        with progress.task("load experts", plan.nbytes) as task:
            _Loading(layout, target, plan, files, task).run(readers)
        return LoadReport(
            rows=sum(map(len, plan.groups)),
            nbytes=plan.nbytes,
            seconds=time.monotonic() - started,
            readers=readers,
            direct_files=sum(f.direct for f in files.values()),
            files=len(files),
            scale_dtype=plan.scale_dtype,
        )


class _StoreTarget:
    """The rows of a store: a host row's own slot; for a device row one of the reader's two, copied on from there.

    Args:
        staging: int64 [readers, 2], slots of the pool.
    """

    def __init__(self, store: RowStore, staging: Index) -> None:
        self._store, self._staging = store, staging
        driver = store.driver
        self._stream = driver.new_stream()
        self._events = [[driver.new_event() for _ in slots] for slots in staging]
        self._turns = [0] * len(staging)  # device rows that each reader has taken

    def take(self, row: int, reader: int) -> Bytes:
        place = int(self._store.place[row])
        if place < 0:
            return self._store.pool.row(-1 - place)
        turn = self._turns[reader]
        if turn >= _STAGING:
            self._store.driver.wait(self._events[reader][turn % _STAGING])
        return self._store.pool.row(int(self._staging[reader, turn % _STAGING]))

    def give(self, row: int, reader: int) -> None:
        store, turn = self._store, self._turns[reader] % _STAGING
        if store.place[row] < 0:
            return
        slot = self._staging[reader, turn : turn + 1]
        to, source = store.addresses(store.place[row : row + 1]), store.addresses(-1 - slot)
        store.driver.copy(to, source, store.row_bytes, self._stream)
        store.driver.record(self._events[reader][turn], self._stream)
        self._turns[reader] += 1

    def stop(self) -> None: ...

    def finish(self) -> None:
        """Wait for the copies."""
        self._store.driver.synchronize(self._stream)


class _Loading:
    """The threads of one load. The first error stops them all."""

    def __init__(
        self, layout: ExpertLayout, target: Target, plan: ReadPlan, files: dict[Path, FileReader], task: Task
    ) -> None:
        self.target, self.files, self.task = target, files, task
        self.placing = Placing(layout, plan.scale_dtype)
        self.units = plan.units
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def run(self, readers: int) -> None:
        threads = [
            threading.Thread(target=self._guard, args=(i,), name=f"q38-load-{i}", daemon=True)
            for i in range(readers)
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: let the readers stop before their memory goes
            self.error = self.error or error
            self.target.stop()
            for thread in threads:
                thread.join()
            raise
        if self.error is not None:
            raise self.error

    def _guard(self, reader: int) -> None:
        try:
            self._read(reader)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            with self.lock:
                self.error = self.error or error
            self.target.stop()

    def _read(self, reader: int) -> None:
        buffer = aligned(0)
        while (unit := self._next()) is not None:
            if (needed := sum(room(e.begin, e.end) for e in unit.extents)) > len(buffer):
                buffer = aligned(needed)
            data = self._fetch(unit, buffer)
            for row, pieces in groupby(unit.pieces, key=lambda p: p.row):
                self.placing.assemble(self.target.take(row, reader), pieces, data)
                self.target.give(row, reader)
            with self.lock:
                self.task.advance(sum(piece.nbytes for piece in unit.pieces))

    def _next(self) -> Unit | None:
        with self.lock:
            return None if self.error else next(self.units, None)

    def _fetch(self, unit: Unit, buffer: Bytes) -> list[tuple[int, Bytes]]:
        """(offset in the unit, bytes) of each extent."""
        parts, start, offset = [], 0, 0
        for extent in unit.extents:
            parts.append((offset, self.files[extent.file].read(extent.begin, extent.end, buffer[start:])))
            start += room(extent.begin, extent.end)
            offset += extent.end - extent.begin
        return parts
