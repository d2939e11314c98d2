"""Read expert rows before the server that needs them is there: the side of the reader.

A server spends its first seconds on imports, during which neither its disk nor its memory is used. A process of its own
makes the memory of the host pool (`SharedMemory`), reads the host rows into their slots, and then device rows into the slots
that are free and into a few more behind the pool, as long as there are any. When the server comes (`attached`), it gets the
memory, takes the device rows out of their slots and gives the slots back, until all rows have passed. The server's interpreter is
busy with other things at that time: rows pass many at once, for each of its calls may wait. Messages are JSON objects, one a line:

    server   {"pool": KEY}                        what it needs; the reader refuses another
    reader   {"pid", "ahead"} + descriptor        the memory is there, with so many slots behind the pool
             {"rows": [...], "slots": [...]}      these rows are complete: slot -1 means in the row's own
             {"done": REPORT}                     no more will come
             {"refused": ERROR}                   the checkpoint is at fault: so would the server say
             {"failed": TEXT}                     the reader is: the server can do without it
    server   {"free": [...]}                      slots that may be filled again
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.base.units import format_bytes
from q38.residency.cache import PoolPlan
from q38.residency.layout import ExpertLayout
from q38.residency.loader import LoadReport, fill_rows
from q38.residency.pool import Bytes
from q38.residency.shards import ReadPlan
from q38.residency.shared import HUGE, SharedMemory, Touching

Message = dict[str, Any]
_LINE = 2**20  # bytes received at once
_PAUSE_S = 0.005  # between two messages, for more rows to come together


def pool_key(pool: PoolPlan) -> Message:
    """What two processes must agree on to share a pool."""
    places = sha256(pool.places.astype("<i8").tobytes()).hexdigest()
    return {"row_bytes": pool.row_bytes, "nbytes": pool.nbytes, "places": places}


def tail_offset(pool: PoolPlan) -> int:
    """Where the slots behind the pool begin."""
    return -(-pool.nbytes // HUGE) * HUGE


def send(connection: socket.socket, message: Message) -> None:
    """One line."""
    connection.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")


def lines(connection: socket.socket, begun: bytes = b"") -> Iterator[Message]:
    """The other side's messages until it hangs up; `begun` was received before.

    Raises:
        OSError: the connection broke, or was silent for longer than its timeout. ValueError: not such a message.
    """
    text = begun
    while True:
        *whole, text = text.split(b"\n")
        yield from map(json.loads, whole)
        if not (more := connection.recv(_LINE)):
            return
        text += more


def peer(connection: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end; of a listener, whoever called `listen` last."""
    size = struct.calcsize("3i")
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, uid


@dataclass(frozen=True)
class Work:
    """What there is to read. `reads`: all rows."""

    layout: ExpertLayout
    reads: ReadPlan
    pool: PoolPlan


class EarlyRows:
    """Rows in shared memory: those read so far, and the slots for more. The target of the loader's threads.

    Args:
        ahead: slots behind the pool.
        touching: the memory's first touch; rows are put only where it has been.
    """

    def __init__(self, pool: PoolPlan, ahead: int, shared: SharedMemory, touching: Touching) -> None:
        self.pool, self.ahead, self.shared, self._touching = pool, ahead, shared, touching
        self._changed = threading.Condition()
        used = int((pool.places < 0).sum())  # the lowest, by `take_places`
        self._free = deque(range(used, pool.slots + ahead))
        self._lent: dict[int, int] = {}  # reader -> the slot that its device row is in
        self._news: list[tuple[int, int]] = []
        self._end: Message | None = None
        self._stopped = False

    def take(self, row: int, reader: int) -> Bytes:
        """As `Target`. Raises ResourceError when nobody will free a slot any more."""
        place = int(self.pool.places[row])
        slot = -1 - place if place < 0 else self._borrow(reader)
        behind = slot - self.pool.slots
        first = (
            slot * self.pool.row_bytes
            if behind < 0
            else tail_offset(self.pool) + behind * self.pool.row_bytes
        )
        end = first + self.pool.row_bytes
        self._touching.wait(end)
        return self.shared.memory[first:end]

    def give(self, row: int, reader: int) -> None:
        """As `Target`."""
        with self._changed:
            self._news.append((row, self._lent.pop(reader, -1)))
            self._changed.notify_all()

    def stop(self) -> None:
        """As `Target`."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def free(self, slots: list[int]) -> None:
        """The server has taken the rows out of these slots."""
        with self._changed:
            self._free.extend(slots)
            self._changed.notify_all()

    def end(self, message: Message) -> None:
        """The last message, after all rows that were read."""
        with self._changed:
            self._end = message
            self._changed.notify_all()

    def messages(self) -> Iterator[Message]:
        """What there is to tell, as it comes, up to and with the last message."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._news) or self._end is not None)
                news, self._news = self._news, []
                end = self._end
            if news:
                yield {"rows": [row for row, _ in news], "slots": [slot for _, slot in news]}
                time.sleep(_PAUSE_S)
            elif end is not None:
                yield end
                return

    def _borrow(self, reader: int) -> int:
        with self._changed:
            self._changed.wait_for(lambda: bool(self._free) or self._stopped)
            if self._stopped:
                raise ResourceError("the server does not take its rows", where="expert rows")
            self._lent[reader] = self._free.popleft()
            return self._lent[reader]


class EarlyReader:
    """Reads on threads of its own from the moment it is made; `serve` hands over what it has.

    Args:
        plan: finds out what there is to read; called on that thread.
        check: refuses so many bytes of memory before they are taken.
        say: gets a line at each stage.
        ahead: bytes behind the pool, for device rows that wait.
    """

    def __init__(
        self,
        plan: Callable[[], Work],
        *,
        check: Callable[[int], None],
        say: Callable[[str], None],
        ahead: int,
        threads: int,
    ) -> None:
        self._plan, self._check, self._say, self._ahead, self._threads = plan, check, say, ahead, threads
        self._ready = threading.Event()
        self._rows: EarlyRows | None = None
        self._failure: Message = {}
        threading.Thread(target=self._run, name="q38-early", daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        """Hand over to the server at the other end; returns when it hangs up.

        Raises:
            OSError: it is gone. ValueError: it sends no such messages.
        """
        incoming = lines(connection)
        request = next(incoming, None)
        if request is None:
            return
        self._ready.wait()
        listening = threading.Thread(target=self._listen, args=(incoming,), name="q38-slots", daemon=True)
        listening.start()
        if self._rows is None:
            send(connection, self._failure)
        elif request.get("pool") != pool_key(self._rows.pool):
            send(connection, {"failed": "it was started for other options"})
        else:
            hello = json.dumps({"pid": os.getpid(), "ahead": self._rows.ahead}).encode() + b"\n"
            socket.send_fds(connection, [hello], [self._rows.shared.fd])
            for message in self._rows.messages():
                send(connection, message)
        connection.shutdown(socket.SHUT_WR)
        listening.join()

    def _listen(self, incoming: Iterator[Message]) -> None:
        with suppress(OSError, ValueError, KeyError):
            for message in incoming:
                if self._rows is not None:
                    self._rows.free(message["free"])
        if self._rows is not None:
            self._rows.stop()

    def _run(self) -> None:
        try:
            end: Message = {"done": self._read().to_dict()}
        except InputError as error:
            end = {"refused": {"what": error.what, "where": error.where, "remedy": error.remedy}}
        except BaseException as error:  # noqa: BLE001 - told to the server, which reads by itself
            end = {"failed": " ".join(str(error).split()) or type(error).__name__}
        self._failure = end
        if self._rows is not None:
            self._rows.end(end)
        self._ready.set()

    def _read(self) -> LoadReport:
        work = self._plan()
        on_host = work.pool.places < 0
        ahead = min(self._ahead // work.pool.row_bytes, int((~on_host).sum()))
        nbytes = tail_offset(work.pool) + ahead * work.pool.row_bytes if ahead else work.pool.nbytes
        self._check(nbytes)
        shared = SharedMemory.create(nbytes)
        touching = Touching(shared, threads=self._threads)
        self._rows = EarlyRows(work.pool, ahead, shared, touching)
        threading.Thread(target=self._touched, args=(touching, nbytes), daemon=True).start()
        parts = []
        for what, wanted in (("host", on_host), ("device", ~on_host)):
            if not wanted.any():
                continue
            parts.append(report := fill_rows(work.reads.only(wanted), work.layout, self._rows))
            # The rate of device rows would be that of the server: most of them wait for it.
            rate = f" at {report.gb_per_second:.2f} GB/s" if what == "host" else ""
            self._say(f"{what} rows read ({format_bytes(report.nbytes)}{rate})")
        return _sum(parts)

    def _touched(self, touching: Touching, nbytes: int) -> None:
        """The server pins the memory as soon as it has it, and then it should be there."""
        try:
            touching.wait(nbytes)
        except ResourceError:
            return  # the loader's threads wait for the same memory, and say so
        self._say(f"pool touched ({format_bytes(nbytes)})")
        self._ready.set()


def _sum(parts: list[LoadReport]) -> LoadReport:
    first = parts[0]
    return LoadReport(
        rows=sum(p.rows for p in parts),
        nbytes=sum(p.nbytes for p in parts),
        seconds=sum(p.seconds for p in parts),
        readers=max(p.readers for p in parts),
        direct_files=max(p.direct_files for p in parts),
        files=max(p.files for p in parts),
        scale_dtype=first.scale_dtype,
    )
