"""The driver calls that residency needs, in ordinary memory: rows on a machine without a GPU.

Device addresses are addresses of this process, streams run at once. With it the CPU engine goes through the
same row store, loader and address tables as a GPU does; only the kernel that reads the rows is another.
"""

from __future__ import annotations

import ctypes
import mmap
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from q38.base.memory import available_memory
from q38.residency.driver import Addresses

if TYPE_CHECKING:
    import torch

# Without letting go of the interpreter: to get it back from a busy thread takes longer than a row.
_memmove = ctypes.PyDLL(None).memmove
_memmove.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove.restype = ctypes.c_void_p


class HostMemory:
    """`q38.residency.driver.Driver` over anonymous mappings."""

    granularity = mmap.PAGESIZE

    def __init__(self) -> None:
        self._mappings: dict[int, mmap.mmap] = {}
        self._names = count(1)

    def memory(self) -> tuple[int, int]:
        """(free, total): what this process can still take, twice."""
        free = available_memory()
        return free, free

    def reserve(self, nbytes: int) -> int:
        """Address space; the kernel backs the pages that are written."""
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(mapping, np.uint8).ctypes.data
        self._mappings[address] = mapping
        return int(address)

    def unreserve(self, address: int, nbytes: int) -> None:
        """The mapping goes with the last tensor that views it."""
        del self._mappings[address]

    def create(self, nbytes: int) -> int:
        """A name; memory comes with the reservation."""
        return next(self._names)

    def release(self, handle: int) -> None: ...

    def map(self, address: int, nbytes: int, handle: int) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Give the pages back."""
        base = max(start for start in self._mappings if start <= address)
        self._mappings[base].madvise(mmap.MADV_DONTNEED, address - base, nbytes)

    def set_access(self, address: int, nbytes: int) -> None: ...

    def register(self, address: int, nbytes: int) -> int:
        """Host memory is read where it is."""
        return address

    def unregister(self, address: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        """As `reserve`, whole pages."""
        return self.reserve(-(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE)

    def deallocate(self, address: int) -> None:
        """As `unreserve`."""
        self.unreserve(address, 0)

    def new_stream(self) -> int:
        """A name."""
        return next(self._names)

    def synchronize(self, stream: int) -> None: ...

    def new_event(self) -> int:
        """A name."""
        return next(self._names)

    def record(self, event: int, stream: int) -> None: ...

    def stream_wait(self, stream: int, event: int) -> None: ...

    def done(self, event: int) -> bool:
        """Always: copies are done when `copy` returns."""
        return True

    def wait(self, event: int) -> None: ...

    def copy(self, to: Addresses, source: Addresses, nbytes: int, stream: int) -> None:
        """Copy at once."""
        for target, origin in zip(to.tolist(), source.tolist(), strict=True):
            _memmove(target, origin, nbytes)

    def capturing(self, stream: int) -> bool:
        """Never."""
        return False

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] that shares the memory."""
        return memory_at(address, nbytes)

    def close(self) -> None: ...


def memory_at(address: int, nbytes: int) -> torch.Tensor:
    """uint8 [nbytes] over memory of this process. The caller keeps it alive."""
    import torch

    return torch.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), dtype=torch.uint8)
