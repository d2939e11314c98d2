"""Pinned host memory for expert rows: one mapping of the exact size, registered with CUDA once.

torch's pinned allocator rounds every block up to a power of two, which costs more than a quarter of
the memory on rows of this model. An anonymous mapping rounds to one page, and registering it pins
those pages where they are.

Nothing is pinned after start: pinning under memory pressure makes the kernel reclaim and compact,
which can stall a serving process for seconds or get it killed.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import ResourceError
from q38.base.memory import available_memory, memlock_limit
from q38.base.progress import SILENT, Progress, Task
from q38.base.settings import cpu_count
from q38.base.units import GIB, MIB, format_bytes
from q38.residency.driver import CudaError, Driver

if TYPE_CHECKING:
    from q38.residency.shared import SharedMemory

Bytes = NDArray[np.uint8]
Index = NDArray[np.int64]

_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; Python has no name for it
_PINNED: dict[int, mmap.mmap] = {}  # a pool that is dropped unclosed must not be unmapped while CUDA has it
_STRIPE = 256 * MIB  # first touch advances by this much, so that progress moves and threads share evenly


@dataclass(frozen=True)
class HostLimits:
    """What the machine allows, in bytes. `memlock` None: no limit."""

    available: int
    memlock: int | None

    @classmethod
    def probe(cls) -> HostLimits:
        """MemAvailable or the cgroup's room, whichever is smaller, and the limit of locked memory."""
        return cls(available_memory(), memlock_limit())


class Slots:
    """A free list: which of the slots [0, usable) are taken. The lowest free slots go first.

    Args:
        capacity: slots there can ever be.
        usable: slots that may be handed out now; all by default.
    """

    def __init__(self, capacity: int, usable: int | None = None, *, name: str = "slots") -> None:
        self.usable = capacity if usable is None else usable
        self._taken = np.zeros(capacity, bool)
        self._name = name

    @property
    def used(self) -> int:
        return int(self._taken.sum())

    @property
    def free(self) -> int:
        return int((~self._taken[: self.usable]).sum())

    def take(self, n: int) -> Index:
        """`n` free slots, lowest first.

        Raises:
            ResourceError: fewer are free; none is taken then.
        """
        slots = np.flatnonzero(~self._taken[: self.usable])[:n]
        if len(slots) < n:
            raise ResourceError(
                f"{n} {self._name} needed, {len(slots)} free: {n - len(slots)} short",
                where="residency",
                remedy="move fewer rows",
            )
        self._taken[slots] = True
        return slots

    def give(self, slots: Index) -> None:
        """Return taken slots.

        Raises:
            ValueError: a slot is free already or named twice: two rows would share it.
        """
        if not self._taken[slots].all() or len(np.unique(slots)) != len(slots):
            raise ValueError(f"{self._name} given back that are not taken")
        self._taken[slots] = False


def take_places(to_device: NDArray[np.bool_], device: Slots, host: Slots) -> Index:
    """A free slot for each entry, the lowest first, all or none: device slot s as s, host slot s as -1 - s.

    Raises:
        ResourceError: too few are free on one side.
    """
    places = np.empty(len(to_device), np.int64)
    count = int(to_device.sum())
    taken = device.take(count)
    try:
        others = host.take(len(to_device) - count)
    except ResourceError:
        device.give(taken)
        raise
    places[to_device], places[~to_device] = taken, -1 - others
    return places


def pool_bytes(row_bytes: int, rows: int, scratch: int) -> int:
    """Bytes of a pool: whole pages."""
    return -(-max(rows * row_bytes + scratch, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


class HostPool:
    """Row slots in pinned memory, and a little scratch memory beside them.

    Args:
        row_bytes: bytes of one row.
        rows: slots.
        scratch: further bytes, for tables that are uploaded from pinned memory.
        limits: what the machine allows; probed by default.
        keep: bytes of host memory that must stay available beside the pool.
        threads: threads for the first touch; all cores by default.
        shared: memory of that size (`pool_bytes`) which another process has touched and fills; the pool closes it.

    Raises:
        ResourceError: the memory is not there (the message gives the shortfall), or CUDA refuses to
            register it. Nothing stays mapped.
    """

    def __init__(
        self,
        driver: Driver,
        row_bytes: int,
        rows: int,
        *,
        scratch: int = 0,
        limits: HostLimits | None = None,
        keep: int = GIB,
        threads: int | None = None,
        progress: Progress = SILENT,
        shared: SharedMemory | None = None,
    ) -> None:
        self.row_bytes, self.rows = row_bytes, rows
        self.requested = rows * row_bytes + scratch
        self.pinned = pool_bytes(row_bytes, rows, scratch)
        self.slots = Slots(rows, name="host slots")
        self._driver = driver
        self._scratch = rows * row_bytes  # where the next piece of scratch starts
        self._shared, self._registered = shared, False
        limits = limits or HostLimits.probe()
        if shared is None:
            check_available(self.pinned, limits, keep)
        elif shared.nbytes != self.pinned:
            raise ValueError(f"{shared.nbytes} bytes of shared memory for a pool of {self.pinned}")
        else:
            check_available(0, limits, keep)  # what is touched is no longer available
        _check_memlock(driver, self.pinned, limits)
        self._map = (
            mmap.mmap(-1, self.pinned, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            if shared is None
            else shared.map
        )
        try:
            self.memory: Bytes = np.frombuffer(self._map, np.uint8) if shared is None else shared.memory
            self.address = self.memory.ctypes.data
            if shared is None:
                _first_touch(self._map, self.memory, threads or cpu_count(), progress)
            self.device_address = driver.register(self.address, self.pinned)
            self._registered = True
            _PINNED[self.address] = self._map
        except BaseException:
            self._unmap()
            raise

    def row(self, slot: int) -> Bytes:
        """uint8 [row_bytes]: the memory of one slot."""
        return self.memory[slot * self.row_bytes : (slot + 1) * self.row_bytes]

    def take_scratch(self, nbytes: int) -> tuple[Bytes, int]:
        """A piece of the scratch memory and the address the device reads it at.

        Raises:
            ResourceError: the scratch memory asked for at start is used up.
        """
        start = self._scratch
        if start + nbytes > self.requested:
            raise ResourceError(
                f"{nbytes} bytes of scratch needed, {self.requested - start} left",
                where="host pool",
                remedy="ask for more scratch memory at start",
            )
        self._scratch += nbytes
        return self.memory[start : start + nbytes], self.device_address + start

    def close(self) -> None:
        """Unpin and unmap. No kernel and no copy may still use the pool."""
        if self._registered:
            self._driver.unregister(self.address)
            self._registered = False
            del _PINNED[self.address]
        self._unmap()

    def _unmap(self) -> None:
        self.memory = np.empty(0, np.uint8)
        if self._shared is not None:
            self._shared.close()
            return
        try:
            self._map.close()
        except BufferError:  # a view of a row still lives; the mapping goes with the last one
            return


def check_available(nbytes: int, limits: HostLimits, keep: int) -> None:
    """Refuse a pool that leaves less than `keep` bytes available.

    Raises:
        ResourceError: with the shortfall.
    """
    room = limits.available - keep
    if nbytes > room:
        raise ResourceError(
            f"{format_bytes(nbytes)} to pin and {format_bytes(keep)} to keep free, {format_bytes(limits.available)} available: "
            f"{format_bytes(nbytes - room)} short",
            where="host memory",
            remedy="hold more experts in VRAM, close other programs, or raise the memory limit of the cgroup",
        )


def _check_memlock(driver: Driver, nbytes: int, limits: HostLimits) -> None:
    if limits.memlock is not None and nbytes > limits.memlock and _counts_as_locked(driver):
        raise ResourceError(
            f"{format_bytes(nbytes)} to pin, {format_bytes(limits.memlock)} may be locked: "
            f"{format_bytes(nbytes - limits.memlock)} short",
            where="RLIMIT_MEMLOCK",
            remedy="raise it (ulimit -l unlimited, or LimitMEMLOCK=infinity in the service)",
        )


def _counts_as_locked(driver: Driver) -> bool:
    """Whether registered memory counts against RLIMIT_MEMLOCK here.

    NVIDIA's Linux driver does not count it, so a desktop's usual limit of 8 MiB must not stop a
    server; a sandbox may. Asked by registering one page under a limit of zero.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        view = np.frombuffer(page, np.uint8)
        address = view.ctypes.data
        del view
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, hard))
        try:
            driver.register(address, mmap.PAGESIZE)
        except CudaError:
            return True
        finally:
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
        driver.unregister(address)
    return False


def _first_touch(mapping: mmap.mmap, memory: Bytes, threads: int, progress: Progress) -> None:
    """Let the kernel back the mapping, in parallel; registering untouched memory does it in one thread."""
    if hasattr(mmap, "MADV_HUGEPAGE"):
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:  # a kernel without transparent huge pages
            if error.errno != errno.EINVAL:
                raise
    stripes = range(0, len(memory), _STRIPE)
    with progress.task("pin host memory", len(memory)) as task, ThreadPoolExecutor(threads) as workers:
        for _ in workers.map(lambda start: _touch(memory[start : start + _STRIPE], task), stripes):
            pass


def _touch(memory: Bytes, task: Task) -> None:
    populate(memory)
    task.advance(len(memory))


def populate(memory: Bytes) -> None:
    """Have the kernel back every page, writable; what is written there stays, if nobody writes meanwhile.

    Raises:
        ResourceError: it has no memory for them.
    """
    if not prefault(memory):
        memory[:: mmap.PAGESIZE] |= 0


def prefault(memory: Bytes) -> bool:
    """The same by the kernel alone, whoever else writes; False where it cannot (before 5.14).

    Raises:
        ResourceError: it has no memory for them.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not libc.madvise(ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(len(memory)), _POPULATE_WRITE):
        return True
    if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise ResourceError(
            f"the kernel could not back {format_bytes(len(memory))} of it",
            where="host memory",
            remedy="close other programs, or hold more experts in VRAM",
        )
    return False
