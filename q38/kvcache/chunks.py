"""A range of device addresses of which any chunk may be backed, in any order.

q38.residency.arena backs a prefix; pages of a KV cache come and go in the middle.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from q38.residency.driver import CudaError, Driver


@dataclass
class _Chunk:
    handle: int
    mapped: bool = False
    readable: bool = False


class SparseArena:
    """Addresses for `capacity` bytes, backed chunk by chunk.

    Raises:
        CudaError: no addresses are left.
    """

    def __init__(self, driver: Driver, capacity: int, chunk: int) -> None:
        assert chunk % driver.granularity == 0, "chunks are multiples of the driver's granularity"
        self._driver, self.chunk = driver, chunk
        self.chunks = -(-capacity // chunk)
        self.base = driver.reserve(self.chunks * chunk)
        # Chunks that are not readable are left over from a call that failed and could not undo itself.
        self._held: dict[int, _Chunk] = {}

    @property
    def committed(self) -> int:
        """Bytes that the driver holds for this arena."""
        return len(self._held) * self.chunk

    def readable(self, chunk: int) -> bool:
        """Whether a chunk is backed."""
        return chunk in self._held and self._held[chunk].readable

    def map(self, chunk: int) -> None:
        """Back a chunk; does nothing when it is.

        Raises:
            OutOfMemory: the driver has no more; what was there before stays as it was.
        """
        if not 0 <= chunk < self.chunks:
            raise ValueError(f"chunk {chunk} of {self.chunks}")
        held = self._held.get(chunk)
        if held is None:
            held = self._held[chunk] = _Chunk(self._driver.create(self.chunk))
        if held.readable:
            return
        address = self.base + chunk * self.chunk
        try:
            if not held.mapped:
                self._driver.map(address, self.chunk, held.handle)
                held.mapped = True
            self._driver.set_access(address, self.chunk)
        except CudaError:
            with suppress(CudaError):
                self.unmap(chunk)
            raise
        held.readable = True

    def unmap(self, chunk: int) -> None:
        """Give a chunk back; does nothing when it is not backed. No kernel may still use it.

        Raises:
            CudaError: the driver refused; call again to go on.
        """
        held = self._held.get(chunk)
        if held is None:
            return
        held.readable = False
        if held.mapped:
            self._driver.unmap(self.base + chunk * self.chunk, self.chunk)
            held.mapped = False
        self._driver.release(held.handle)
        del self._held[chunk]

    def held(self) -> list[int]:
        """Chunks that take memory, readable or left over."""
        return sorted(self._held)

    def close(self) -> None:
        """Give everything back, the addresses too."""
        for chunk in self.held():
            self.unmap(chunk)
        self._driver.unreserve(self.base, self.chunks * self.chunk)
