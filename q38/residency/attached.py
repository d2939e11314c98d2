"""Take over the rows that an early reader has read: the side of the server. See `early`."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import numpy as np

from q38.base.errors import InputError, ResourceError
from q38.residency.cache import PoolPlan
from q38.residency.early import Message, lines, peer, pool_key, send, tail_offset
from q38.residency.loader import LoadReport
from q38.residency.pool import HostLimits
from q38.residency.shared import SharedMemory
from q38.residency.store import Mask, RowStore

SILENCE_S = 60.0  # a reader that says nothing for so long is given up
_END_S = 10.0
_HELLO = 4096


class Unanswered(Exception):
    """There is no reader to take rows from; says why."""


class Attached:
    """The reader's memory, mapped here, and its rows as they come.

    Attributes:
        shared: memory of the whole pool; whoever opens the pool closes it.
        report: how the reader fared; None unless it finished.
        told: which rows were there at once, and how fast the others came; for the log.
        lost: why it did not finish; None while all is well.
    """

    def __init__(self, address: str | bytes, pool: PoolPlan, *, silence_s: float = SILENCE_S) -> None:
        """Connect to the reader that listens at `address`, and map its memory.

        Raises:
            Unanswered: nobody is there, or cannot help; then the reader and its memory are gone.
            InputError: the reader found the checkpoint to be at fault.
        """
        self.report: LoadReport | None = None
        self.told = ""
        self.lost: str | None = None
        self._reader: int | None = None
        self._tail: SharedMemory | None = None
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(silence_s)
        with ExitStack() as undo:
            undo.callback(self.close)
            try:
                self._map(self._ask(address, pool), pool, undo)
            except (OSError, ValueError, KeyError, ResourceError) as error:
                raise Unanswered(str(error)) from None
            undo.pop_all()

    def _ask(self, address: str | bytes, pool: PoolPlan) -> Message:
        """The reader's first message, with the descriptor of its memory as "fd". Raises as `__init__`."""
        self._connection.connect(address)
        pid, uid = peer(self._connection)
        if uid != os.geteuid():
            raise Unanswered("another user's process answers")
        # The process that made the socket, as long as the reader has not got to listening for itself.
        if pid not in (os.getpid(), os.getppid(), os.getpgrp()):
            self._reader = os.pidfd_open(pid)
        send(self._connection, {"pool": pool_key(pool)})
        text, fds, _, _ = socket.recv_fds(self._connection, _HELLO, 1)
        with ExitStack() as undo:
            for fd in fds:
                undo.callback(os.close, fd)
            self._messages = lines(self._connection, text)
            hello = next(self._messages, None)
            if hello is None:
                raise Unanswered("it hung up")
            _refuse(hello)
            if not fds:
                raise Unanswered(str(hello.get("failed", hello)))
            if self._reader is None:
                self._reader = os.pidfd_open(hello["pid"])
            undo.pop_all()
        return {**hello, "fd": fds[0]}

    def _map(self, hello: Message, pool: PoolPlan, undo: ExitStack) -> None:
        """Map the pool, and what lies behind it. A mapping that nobody uses would keep the memory."""
        self.shared = SharedMemory(hello["fd"], pool.nbytes)
        undo.callback(self.shared.close)
        self._slots = pool.slots
        if behind := hello["ahead"] * pool.row_bytes:
            self._tail = SharedMemory(os.dup(self.shared.fd), behind, tail_offset(pool))

    def limits(self) -> HostLimits:
        """What the machine allows, counting as available what will be given back after loading."""
        limits = HostLimits.probe()
        behind = 0 if self._tail is None else self._tail.nbytes
        return replace(limits, available=limits.available + behind)

    def back(self, threads: int) -> None:
        """Enter the memory into the page tables, before it is pinned."""
        for part in (self.shared, self._tail):
            if part is not None:
                part.back(threads)

    def receive(self, store: RowStore) -> Mask:
        """Wait for all rows; those of the device are copied to their places.

        Returns:
            bool [rows]: which rows are where they belong. If not all are, `lost` says why, the reader is dead, and its memory
            may be used for anything.

        Raises:
            InputError: the reader found the checkpoint to be at fault. ResourceError: CUDA fails, or a reader that is stuck does not end.
        """
        arrived = np.zeros(store.rows, bool)
        slots = store.pool.slots.take(store.pool.slots.free)  # the reader has them meanwhile
        at_once, begun = 0, time.monotonic()
        tail, driver = None, store.driver
        try:
            stream = driver.new_stream()
            if self._tail is not None:
                tail = driver.register(self._tail.memory.ctypes.data, self._tail.nbytes)
            for message in self._until_the_end():
                rows, lent = np.array(message["rows"]), np.array(message["slots"])
                if len(moved := np.flatnonzero(lent >= 0)):
                    behind = (lent[moved] - self._slots) * store.row_bytes + (tail or 0)
                    source = np.where(lent[moved] < self._slots, store.addresses(-1 - lent[moved]), behind)
                    driver.copy(store.addresses(store.place[rows[moved]]), source, store.row_bytes, stream)
                    driver.synchronize(stream)
                arrived[rows] = True
                at_once = at_once or len(rows)
                if len(moved):
                    send(self._connection, {"free": lent[moved].tolist()})
        except (OSError, ValueError, KeyError) as error:
            self.lost = str(error) or type(error).__name__
        finally:
            self.close()
            store.pool.slots.give(slots)
            if self._tail is not None:
                if tail is not None:
                    driver.unregister(self._tail.memory.ctypes.data)
                self._tail.close()
        late = int(arrived.sum()) - at_once
        rate = late * store.row_bytes / max(time.monotonic() - begun, 1e-9) / 1e9
        self.told = f"{at_once} at once, {late} at {rate:.2f} GB/s"
        return arrived

    def close(self) -> None:
        """Hang up, and see that the reader, where there is one, is gone: nobody else may write into the pool.

        Raises:
            ResourceError: it does not end.
        """
        self._connection.close()
        if self._reader is None:
            return
        fd, self._reader = self._reader, None
        try:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            if not select.select([fd], [], [], _END_S)[0]:
                raise ResourceError("the process that reads them does not end", where="expert rows")
        finally:
            os.close(fd)

    def _until_the_end(self) -> Iterator[Message]:
        for message in self._messages:
            _refuse(message)
            if "done" in message:
                figures = {k: v for k, v in message["done"].items() if k != "gb_per_second"}
                self.report = LoadReport(**figures)
                return
            if "failed" in message:
                self.lost = message["failed"]
                return
            yield message
        self.lost = "it hung up"


def _refuse(message: Message) -> None:
    """The reader's verdict on the checkpoint, in its own words."""
    if "refused" in message:
        error = message["refused"]
        raise InputError(error["what"], where=error["where"], remedy=error["remedy"])
