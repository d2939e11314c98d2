"""Read parts of large files once, at disk speed, without filling the page cache.

A file that the page cache already holds is read through it. Any other is read with O_DIRECT, which
spares a copy and the cache that pinned memory competes with; file systems without it (tmpfs, some
network mounts) are read through the cache, and what was read is dropped from it again.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

from q38.base.errors import InputError
from q38.residency.pool import Bytes

ALIGN = 4096  # offsets, lengths and memory of direct reads; every block device accepts it
_CACHED = 0.5  # above this share in the page cache, reading through it is faster
_CACHESTAT = 451  # the system call's number on every architecture, Linux 6.5


class FileReader:
    """One file, opened for reading once. Safe to use from several threads.

    Args:
        direct: True or False forces or forbids O_DIRECT; None decides by the page cache.

    Raises:
        InputError: the file cannot be opened.
    """

    def __init__(self, file: Path, *, direct: bool | None = None) -> None:
        self.file = file
        try:
            self._fd = os.open(file, os.O_RDONLY)
            if direct is None:
                direct = cached_share(self._fd) < _CACHED
                self._drop = direct
            else:
                self._drop = False
            self.direct = direct and self._go_direct()
        except OSError as error:
            raise InputError(
                f"cannot be read ({error.strerror})", where=file, remedy="check its permissions"
            ) from None

    def read(self, begin: int, end: int, buffer: Bytes) -> Bytes:
        """Bytes [begin, end) of the file, as a view of `buffer`.

        Args:
            buffer: uint8, at least `room(begin, end)` long, starting at a multiple of ALIGN.

        Raises:
            InputError: the file ends before `end`, or the disk fails.
        """
        first = begin // ALIGN * ALIGN if self.direct else begin
        stop = -(-end // ALIGN) * ALIGN if self.direct else end
        position = reached = first
        while reached < end:
            try:
                n = os.preadv(self._fd, [buffer[position - first : stop - first].data], position)
            except OSError as error:
                raise InputError(
                    f"cannot be read at byte {position} ({error.strerror})",
                    where=self.file,
                    remedy="check the disk",
                ) from None
            if position + n <= reached:
                raise InputError(
                    f"the file ends at byte {reached}, its header describes {end}",
                    where=self.file,
                    remedy="download the file again",
                )
            reached = position + n
            # A direct read may end anywhere, but must start aligned.
            position = reached // ALIGN * ALIGN if self.direct else reached
        if self._drop and not self.direct:
            os.posix_fadvise(self._fd, begin, end - begin, os.POSIX_FADV_DONTNEED)
        return buffer[begin - first : end - first]

    def close(self) -> None:
        os.close(self._fd)

    def _go_direct(self) -> bool:
        """Reopen with O_DIRECT and try one read; False where the file system has no such thing."""
        try:
            fd = os.open(self.file, os.O_RDONLY | os.O_DIRECT)
        except (AttributeError, OSError):
            return False
        try:
            os.preadv(fd, [aligned(ALIGN).data], 0)
        except OSError:
            os.close(fd)
            return False
        os.close(self._fd)
        self._fd = fd
        return True


def room(begin: int, end: int) -> int:
    """Bytes of buffer that reading [begin, end) takes."""
    return -(-end // ALIGN) * ALIGN - begin // ALIGN * ALIGN


def aligned(nbytes: int) -> Bytes:
    """uint8 [nbytes] that starts at a page, for direct reads."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8)[:nbytes]


class _CacheStat(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    ]


class _CacheRange(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


def cached_share(fd: int) -> float:
    """Share of a file's pages that the page cache holds; 0 where the kernel cannot say."""
    pages = -(-os.fstat(fd).st_size // mmap.PAGESIZE)
    whole, stat = _CacheRange(0, 0), _CacheStat()
    call = ctypes.CDLL(None, use_errno=True).syscall
    if not pages or call(_CACHESTAT, fd, ctypes.byref(whole), ctypes.byref(stat), 0):
        return 0.0
    cached: int = stat.cached
    return cached / pages
