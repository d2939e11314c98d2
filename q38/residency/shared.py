"""Host memory without a name that a second process can map: what a reader fills and a server then pins.

A memfd: it lives as long as somebody holds its descriptor or a mapping of it, so nothing is left behind however either
process ends. The kernel charges it once, to the cgroup of the process that touched it first.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from q38.base.errors import ResourceError
from q38.base.units import MIB
from q38.residency.pool import Bytes, populate, prefault

HUGE = 2 * MIB  # of x86-64 and of arm64 with 4 KiB pages; elsewhere collapsing is refused and small pages do
_COLLAPSE = 25  # MADV_COLLAPSE, Linux 6.1; Python has no name for it
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_STRIPE = 64 * MIB
_THREADS = 4  # more of them only wait for each other: all pages go into one file


class SharedMemory:
    """A mapping of a memfd that starts at a multiple of HUGE, as huge pages need.

    Args:
        fd: of the memfd. It is closed with the mapping.
        nbytes: of it to map, from `offset` on, a multiple of HUGE.

    Raises:
        ResourceError: it cannot be mapped.
    """

    def __init__(self, fd: int, nbytes: int, offset: int = 0) -> None:
        self.fd, self.nbytes = fd, nbytes
        # Addresses to choose an aligned one from; the file is then mapped over them and goes when they go.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        try:
            self.map = mmap.mmap(-1, nbytes + HUGE, flags=flags)
        except OSError as error:
            os.close(fd)
            raise ResourceError(f"no addresses ({error.strerror})", where="shared memory") from None
        around = np.frombuffer(self.map, np.uint8)
        start = -around.ctypes.data % HUGE
        self.memory: Bytes = around[start : start + nbytes]
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
        address = self.memory.ctypes.data
        flags, access = mmap.MAP_SHARED | _MAP_FIXED, mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mmap(address, nbytes, access, flags, fd, offset) != address:
            code = ctypes.get_errno()
            self.close()
            raise ResourceError(f"cannot be mapped ({os.strerror(code)})", where="shared memory")

    @classmethod
    def create(cls, nbytes: int) -> SharedMemory:
        """New memory; the kernel backs what is touched.

        Raises:
            ResourceError: the system gives none.
        """
        try:
            fd = os.memfd_create("q38-rows", os.MFD_CLOEXEC)
            os.ftruncate(fd, nbytes)
        except OSError as error:
            raise ResourceError(f"none to be had ({error.strerror})", where="shared memory") from None
        return cls(fd, nbytes)

    def back(self, threads: int) -> None:
        """Enter every page into this process's page tables, several threads at once: pinning would do it page by page.

        Only by the kernel: another process may be writing there.
        """
        stripes = (self.memory[s : s + _STRIPE] for s in range(0, self.nbytes, _STRIPE))
        with ThreadPoolExecutor(min(threads, _THREADS)) as workers:
            for _ in workers.map(prefault, stripes):
                pass

    def close(self) -> None:
        """Unmap, or let the mapping go with the last view of it."""
        self.memory = np.empty(0, np.uint8)
        try:
            self.map.close()
        except BufferError:
            pass
        finally:
            os.close(self.fd)


class Touching:
    """First touch of shared memory, front to back on threads of its own, so that others may use the front meanwhile.

    Args:
        threads: at most; few are enough.
    """

    def __init__(self, shared: SharedMemory, *, threads: int) -> None:
        self._memory, self._threads = shared.memory, min(threads, _THREADS)
        self._ready = threading.Condition()
        self._touched = 0
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="q38-touch", daemon=True).start()

    def wait(self, end: int) -> None:
        """Until the first `end` bytes are there.

        Raises:
            ResourceError: the kernel has no memory for them.
        """
        with self._ready:
            self._ready.wait_for(lambda: self._touched >= end or self._error is not None)
            if self._touched < end:
                assert self._error is not None
                raise self._error

    def _run(self) -> None:
        starts = range(0, len(self._memory), _STRIPE)
        try:
            with ThreadPoolExecutor(self._threads) as workers:
                for nbytes in workers.map(lambda s: _touch(self._memory[s : s + _STRIPE]), starts):
                    with self._ready:
                        self._touched += nbytes
                        self._ready.notify_all()
        except BaseException as error:  # noqa: BLE001 - handed to those who wait
            with self._ready:
                self._error = error
                self._ready.notify_all()


def _touch(memory: Bytes) -> int:
    """Back one stripe: in huge pages where that is possible, the rest in small ones."""
    # Systems have huge pages of shared memory switched off; collapsing is not subject to that. It wants one page to be there.
    memory[::HUGE] = 0
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), _COLLAPSE)
    populate(memory)
    return len(memory)
