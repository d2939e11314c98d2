"""Many small reads at once, past the page cache: Linux native AIO (io_submit) on files opened with O_DIRECT.

A disk reaches its rate of random reads only with dozens in flight. Threads of Python would spend more time on handing
over than on reading; here a batch is an array of control blocks and a few system calls, made without the interpreter's lock.

https://man7.org/linux/man-pages/man2/io_submit.2.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.residency.reader import ALIGN, aligned

DEPTH = 256  # reads in flight at most
_BLOCK = 4096  # pages of one batch: 16 MiB of buffer
# io_setup, io_destroy, io_getevents, io_submit
_CALLS = {"x86_64": (206, 207, 208, 209), "aarch64": (0, 1, 4, 2)}
_CONTROL = np.dtype(
    [
        ("data", "<u8"), ("key", "<u4"), ("rw_flags", "<i4"), ("opcode", "<u2"), ("priority", "<i2"), ("file", "<u4"),
        ("buffer", "<u8"), ("bytes", "<u8"), ("offset", "<i8"), ("reserved", "<u8"), ("flags", "<u4"), ("event", "<u4"),
    ]
)  # fmt: skip
_EVENT = np.dtype([("data", "<u8"), ("control", "<u8"), ("result", "<i8"), ("result2", "<i8")])


class AioQueue:
    """Reads pages of one file. Not for several threads at once.

    Raises:
        OSError: this kernel or file system has no such reads.
    """

    def __init__(self, file: Path, *, depth: int = DEPTH) -> None:
        calls = _CALLS.get(platform.machine())
        if calls is None:
            raise OSError(errno.ENOSYS, "native AIO", str(file))
        self.file, self.depth = file, depth
        self._setup, self._destroy, self._events_call, self._submit = calls
        self._library = ctypes.CDLL(None, use_errno=True)
        self._fd = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._context = ctypes.c_ulong(0)
        try:
            self.size = os.fstat(self._fd).st_size
            self._buffer = aligned(min(_BLOCK, max(-(-self.size // ALIGN), 1)) * ALIGN)
            os.preadv(
                self._fd, [self._buffer[:ALIGN].data], 0
            )  # refuses where O_DIRECT opens but does not read
            self._call(self._setup, depth, ctypes.byref(self._context))
        except OSError:
            os.close(self._fd)
            raise
        self._events = np.zeros(depth, _EVENT)

    @property
    def descriptor(self) -> int:
        """The file, open for direct reads."""
        return self._fd

    @property
    def context(self) -> int:
        """The kernel's handle of the queue."""
        return int(self._context.value)

    def read(self, offsets: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        """`width` bytes at each offset, at most a page: uint8 [n, width]. Each page is read once.

        Raises:
            InputError: the file ends before, or the disk fails.
        """
        out = np.empty((len(offsets), width), np.uint8)
        order = np.argsort(offsets, kind="stable")
        ordered = offsets[order]
        room = len(self._buffer) // ALIGN
        begin = 0
        while begin < len(ordered):
            # A row may lie on two pages, so that many rows always fit.
            end = min(begin + max(room // 2, 1), len(ordered))
            out[order[begin:end]] = self._read_block(ordered[begin:end], width)
            begin = end
        return out

    def close(self) -> None:
        """Close the file."""
        if self._context:
            self._call(self._destroy, self._context)
            self._context = ctypes.c_ulong(0)
            os.close(self._fd)

    def _read_block(self, offsets: NDArray[np.int64], width: int) -> NDArray[np.uint8]:
        first = offsets // ALIGN
        pages = np.unique(np.concatenate([first, (offsets + width - 1) // ALIGN]))
        self._read_pages(pages)
        # The second page of a row is the next one in order, so each row is contiguous in the buffer.
        at = np.searchsorted(pages, first) * ALIGN + offsets % ALIGN
        windows = np.lib.stride_tricks.sliding_window_view(self._buffer, width)
        rows: NDArray[np.uint8] = windows[at]
        return rows

    def _read_pages(self, pages: NDArray[np.int64]) -> None:
        """Pages into the buffer, in the order given."""
        n = len(pages)
        controls = np.zeros(n, _CONTROL)
        controls["data"] = np.arange(n)
        controls["file"] = self._fd
        controls["buffer"] = self._buffer.ctypes.data + np.arange(n) * ALIGN
        controls["bytes"] = ALIGN
        controls["offset"] = pages * ALIGN
        pointers = (controls.ctypes.data + np.arange(n) * _CONTROL.itemsize).astype(np.uint64)
        whole = np.minimum(self.size - pages * ALIGN, ALIGN)  # the last page of a file may be short
        sent = done = 0
        while done < n:
            if sent < n and sent - done < self.depth:
                count = min(n - sent, self.depth - (sent - done))
                sent += self._call(
                    self._submit, self._context, count, ctypes.c_void_p(pointers.ctypes.data + 8 * sent)
                )
            # Refill at three quarters, so that the disk never runs dry and system calls stay few.
            wanted = max(1, min(sent - done, self.depth // 4))
            got = self._call(
                self._events_call,
                self._context,
                wanted,
                self.depth,
                ctypes.c_void_p(self._events.ctypes.data),
                None,
            )
            events = self._events[:got]
            short = events["result"] < whole[events["data"].astype(np.int64)]
            done += got
            if short.any():
                self._drain(sent - done)
                page = int(pages[int(events["data"][short][0])])
                raise InputError(
                    f"cannot be read at byte {page * ALIGN}", where=self.file, remedy="make the table again"
                )

    def _drain(self, count: int) -> None:
        """Wait for what is in flight: it writes into the buffer."""
        while count > 0:
            count -= self._call(
                self._events_call,
                self._context,
                1,
                self.depth,
                ctypes.c_void_p(self._events.ctypes.data),
                None,
            )

    def _call(self, number: int, *arguments: object) -> int:
        while True:
            result: int = self._library.syscall(ctypes.c_long(number), *arguments)
            if result >= 0:
                return result
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code), str(self.file))
