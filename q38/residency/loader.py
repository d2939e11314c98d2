"""Load the experts of a packed checkpoint into their rows.

The packed tensors already are a row's parts, so loading is reading and placing: no transposition and
no second copy of the model. Several threads each read a unit (a few experts) into a buffer of their
own and place it: a host row directly in its slot, a device row in one of two borrowed pinned slots,
from where it is copied on while the next is placed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError, ResourceError
from q38.base.progress import SILENT, Progress, Task
from q38.checkpoint.index import Checkpoint
from q38.residency.layout import SCALE_BYTES, ExpertLayout
from q38.residency.pool import Bytes, Index
from q38.residency.reader import FileReader, aligned, room
from q38.residency.shards import Piece, ReadPlan, Unit, plan_reads
from q38.residency.store import RowStore

READERS = 8  # threads; two requests or more in flight saturate every disk seen
_EXPONENT = {"F16": 0x7C00, "BF16": 0x7F80}  # all ones in the exponent: infinite or not a number
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


def load_rows(
    checkpoint: Checkpoint,
    layout: ExpertLayout,
    store: RowStore,
    *,
    plan: ReadPlan | None = None,
    readers: int = READERS,
    unit: int = 8 * 2**20,
    direct: bool | None = None,
    progress: Progress = SILENT,
) -> LoadReport:
    """Fill every row of `store` from `checkpoint`, check it, and publish the address table.

    Takes at most `readers` x (unit + one expert) bytes of memory beside the rows.

    Args:
        plan: what `plan_reads` found; made here where it is not given.
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
    started = time.monotonic()
    plan = plan or plan_reads(checkpoint, layout, unit=unit)
    nbytes = plan.nbytes
    with ExitStack() as stack:
        files: dict[Path, FileReader] = {}
        for file in plan.files:
            files[file] = FileReader(file, direct=direct)
            stack.callback(files[file].close)
        readers = min(readers, len(plan.groups), store.pool.slots.free // _STAGING)
        if readers < 1:
            raise ResourceError(
                f"{_STAGING} free slots needed to load through, {store.pool.slots.free} are free",
                where="host pool",
                remedy="start with more spare slots",
            )
        slots = store.pool.slots.take(readers * _STAGING)
        stack.callback(store.pool.slots.give, slots)
        with progress.task("load experts", nbytes) as task:
            _Loading(layout, store, plan, files, slots.reshape(readers, _STAGING), task).run()
        store.publish()
    return LoadReport(
        rows=store.rows,
        nbytes=nbytes,
        seconds=time.monotonic() - started,
        readers=readers,
        direct_files=sum(f.direct for f in files.values()),
        files=len(files),
        scale_dtype=plan.scale_dtype,
    )


class _Loading:
    """The threads of one load. The first error stops them all."""

    def __init__(
        self,
        layout: ExpertLayout,
        store: RowStore,
        plan: ReadPlan,
        files: dict[Path, FileReader],
        staging: Index,
        task: Task,
    ) -> None:
        self.layout, self.store, self.plan, self.files, self.staging, self.task = (
            layout,
            store,
            plan,
            files,
            staging,
            task,
        )
        self.stream = store.driver.new_stream()
        self.events = [[store.driver.new_event() for _ in slots] for slots in staging]
        self.units = plan.units
        self.lock = threading.Lock()
        self.error: BaseException | None = None

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._guard, args=(i,), name=f"q38-load-{i}")
            for i in range(len(self.staging))
        ]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException as error:  # Ctrl-C: let the readers stop before their memory goes
            self.error = self.error or error
            for thread in threads:
                thread.join()
            raise
        finally:
            self.store.driver.synchronize(self.stream)
        if self.error is not None:
            raise self.error

    def _guard(self, reader: int) -> None:
        try:
            self._read(reader)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            with self.lock:
                self.error = self.error or error

    def _read(self, reader: int) -> None:
        buffer = aligned(0)
        turn = 0
        while (unit := self._next()) is not None:
            if (needed := sum(room(e.begin, e.end) for e in unit.extents)) > len(buffer):
                buffer = aligned(needed)
            data = self._fetch(unit, buffer)
            for row, pieces in groupby(unit.pieces, key=lambda p: p.row):
                place = int(self.store.place[row])
                if place < 0:
                    self._assemble(self.store.pool.row(-1 - place), pieces, data)
                else:
                    self._stage(row, pieces, data, reader, turn % _STAGING, reused=turn >= _STAGING)
                    turn += 1
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

    def _stage(
        self,
        row: int,
        pieces: Iterator[Piece],
        data: list[tuple[int, Bytes]],
        reader: int,
        turn: int,
        *,
        reused: bool,
    ) -> None:
        """Assemble a device row in a pinned slot and enqueue its copy."""
        driver, event, slot = (
            self.store.driver,
            self.events[reader][turn],
            self.staging[reader, turn : turn + 1],
        )
        if reused:
            driver.wait(event)
        self._assemble(self.store.pool.row(int(slot[0])), pieces, data)
        to, source = self.store.addresses(self.store.place[row : row + 1]), self.store.addresses(-1 - slot)
        driver.copy(to, source, self.layout.row_bytes, self.stream)
        driver.record(event, self.stream)

    def _assemble(self, row: Bytes, pieces: Iterator[Piece], data: list[tuple[int, Bytes]]) -> None:
        for piece in pieces:
            offset, part = next(p for p in reversed(data) if p[0] <= piece.start)
            self._place(row, piece, part[piece.start - offset : piece.start - offset + piece.nbytes])

    def _place(self, row: Bytes, piece: Piece, source: Bytes) -> None:
        """Put one tensor where the layout has it: gate columns left of up columns, down on its own."""
        layout = self.layout
        if piece.kind == "qzeros":
            self._check_zeros(piece, source)
            return
        if piece.kind == "scales":
            self._check_scales(piece, source)
        words = piece.kind == "qweight"
        if piece.proj == "down_proj":
            start = layout.w2_offset if words else layout.w2_scale_offset
            row[start : start + piece.nbytes] = source
            return
        start = layout.w13_offset if words else layout.w13_scale_offset
        height = (layout.w13_shape if words else layout.w13_scale_shape)[0]
        width = layout.intermediate * (4 if words else SCALE_BYTES)  # bytes of one projection's columns
        both = row[start : start + 2 * height * width].reshape(
            height, 2, width
        )  # [K / codes, gate and up, bytes]
        both[:, int(piece.proj == "up_proj")] = source.reshape(height, width)

    def _check_scales(self, piece: Piece, source: Bytes) -> None:
        exponent = _EXPONENT[self.plan.scale_dtype]
        bad = int((source.view(np.uint16) & exponent == exponent).sum())
        if bad:
            raise InputError(
                f"{bad} scales of {piece.name} are not finite",
                where="experts",
                remedy="quantize this layer again",
            )

    def _check_zeros(self, piece: Piece, source: Bytes) -> None:
        stored = (1 << (self.layout.bits - 1)) - 1
        word = sum(stored << shift for shift in range(0, 32, self.layout.bits))
        if not (source.view(np.uint32) == word).all():
            raise InputError(
                f"{piece.name} is not symmetric (words other than {word:#010x})",
                where="experts",
                remedy="quantize with sym: true",
            )
