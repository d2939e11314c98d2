"""A range of device addresses whose memory can be given back to the driver.

Addresses are reserved once and never change, so captured graphs and address tables stay valid while
physical memory is mapped and unmapped at the end of the range, a chunk at a time. Rows lie back to
back across chunk borders: the whole arena wastes less than one chunk to rounding.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from q38.base.units import MIB
from q38.residency.driver import CudaError, Driver

if TYPE_CHECKING:
    import torch

CHUNK = 16 * MIB  # one create + map takes about 70 us whatever its size


@dataclass
class _Chunk:
    handle: int
    mapped: bool = False


class Arena:
    """Device memory behind [base, base + backed).

    Args:
        capacity: bytes of addresses to reserve.
        chunk: bytes mapped at once; rounded up to the driver's granularity.

    Raises:
        CudaError: no addresses are left.
    """

    def __init__(self, driver: Driver, capacity: int, *, chunk: int = CHUNK) -> None:
        self._driver = driver
        self.chunk = _round_up(chunk, driver.granularity)
        self.capacity = _round_up(capacity, self.chunk)
        self.base = driver.reserve(self.capacity)
        # The first `_ready` chunks are readable. What lies beyond is left over from a call that failed
        # and could not undo itself; the next call uses or drops it.
        self._chunks: list[_Chunk] = []
        self._ready = 0

    @property
    def backed(self) -> int:
        """Readable bytes from the base on."""
        return self._ready * self.chunk

    @property
    def committed(self) -> int:
        """Bytes the driver holds for this arena; more than `backed` only after a failed roll-back."""
        return len(self._chunks) * self.chunk

    def grow_to(self, nbytes: int) -> None:
        """Back at least `nbytes`. Does nothing when they are backed already.

        Raises:
            OutOfMemory: the driver has no more; the arena is as it was before the call.
            ValueError: beyond the capacity.
        """
        if nbytes > self.capacity:
            raise ValueError(f"{nbytes} bytes asked of an arena of {self.capacity}")
        before, need = self._ready, -(-nbytes // self.chunk)
        if need <= before:
            return
        try:
            for i in range(before, need):
                if i == len(self._chunks):
                    self._chunks.append(_Chunk(self._driver.create(self.chunk)))
                if not self._chunks[i].mapped:
                    self._driver.map(self.base + i * self.chunk, self.chunk, self._chunks[i].handle)
                    self._chunks[i].mapped = True
            self._driver.set_access(self.base + before * self.chunk, (need - before) * self.chunk)
        except CudaError:
            with suppress(CudaError):
                self.shrink_to(before * self.chunk)
            raise
        self._ready = need

    def shrink_to(self, nbytes: int) -> None:
        """Give back every chunk that lies wholly beyond `nbytes`.

        No kernel and no copy may still use those addresses.

        Raises:
            CudaError: the driver refused; the chunks it kept are counted in `committed`.
        """
        keep = -(-nbytes // self.chunk)
        self._ready = min(self._ready, keep)
        while len(self._chunks) > keep:
            chunk = self._chunks[-1]
            if chunk.mapped:
                self._driver.unmap(self.base + (len(self._chunks) - 1) * self.chunk, self.chunk)
                chunk.mapped = False
            self._driver.release(chunk.handle)
            self._chunks.pop()

    def view(self, start: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] of backed memory, `start` bytes after the base. Invalid once it is unmapped.

        Raises:
            ValueError: the range is not wholly backed.
        """
        if start < 0 or start + nbytes > self.backed:
            raise ValueError(f"bytes {start} to {start + nbytes} of an arena with {self.backed} backed")
        return self._driver.tensor(self.base + start, nbytes)

    def close(self) -> None:
        """Give everything back, the addresses too."""
        self.shrink_to(0)
        self._driver.unreserve(self.base, self.capacity)


def _round_up(n: int, unit: int) -> int:
    return -(-max(n, 1) // unit) * unit
