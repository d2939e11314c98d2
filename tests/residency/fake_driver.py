"""The driver calls in ordinary memory, with streams that run late and failures on demand.

Device addresses are real addresses of this process, so kernels' reads and copies are memory accesses
that the fake checks first: against what is mapped and accessible, and against what is registered.
Work enqueued on a stream runs only when the stream is advanced, so a missing fence shows up as a read
of a row that is no longer there. Memory that is unmapped or freshly mapped is poisoned.
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from q38.residency.driver import Addresses, OutOfMemory


class FakeDriver:
    """In-memory `q38.residency.driver.Driver`.

    Args:
        total: bytes of device memory that `create` can give.
        granularity: bytes.
        seed: order of the copies of one batch.
    """

    def __init__(self, *, total: int = 2**30, granularity: int = 64, seed: int = 0) -> None:
        self.total = total
        self.fail_at: int | None = None  # calls until one fails
        self.calls: list[str] = []
        self.counts_memlock = False
        self.capture = False
        self.reservations: dict[
            int, tuple[np.ndarray, np.ndarray, np.ndarray]
        ] = {}  # memory, mapped handle, accessible
        self.handles: dict[int, int] = {}  # handle -> bytes
        self.registered: dict[int, int] = {}
        self.allocations: dict[int, np.ndarray] = {}
        self.streams: dict[int, deque[Callable[[], None]]] = {0: deque()}
        self.events: dict[int, int] = {}  # event -> records not yet reached
        self.recorded: dict[int, tuple[int, int]] = {}  # event -> records so far, stream of the last one
        self._granularity = granularity
        self._next = 1
        self._running = threading.RLock()
        self._random = random.Random(seed)

    @property
    def granularity(self) -> int:
        return self._granularity

    @property
    def committed(self) -> int:
        return sum(self.handles.values())

    def memory(self) -> tuple[int, int]:
        self._call("memory")
        return self.total - self.committed, self.total

    def reserve(self, nbytes: int) -> int:
        self._call("reserve")
        assert nbytes % self._granularity == 0
        memory = np.full(nbytes, 0xDD, np.uint8)
        chunks = nbytes // self._granularity
        self.reservations[memory.ctypes.data] = (memory, np.zeros(chunks, np.int64), np.zeros(chunks, bool))
        return memory.ctypes.data

    def unreserve(self, address: int, nbytes: int) -> None:
        self._call("unreserve")
        memory, mapped, _ = self.reservations[address]
        assert len(memory) == nbytes and not mapped.any(), "addresses freed while mapped"
        del self.reservations[address]

    def create(self, nbytes: int) -> int:
        self._call("create")
        assert nbytes % self._granularity == 0
        if self.committed + nbytes > self.total:
            raise OutOfMemory("create")
        self.handles[self._name()] = nbytes
        return self._next - 1

    def release(self, handle: int) -> None:
        self._call("release")
        assert not any((mapped == handle).any() for _, mapped, _ in self.reservations.values()), (
            "released while mapped"
        )
        del self.handles[handle]

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._call("map")
        memory, mapped, _, part, span = self._range(address, nbytes)
        assert self.handles[handle] == nbytes and not mapped[part].any(), "mapped twice"
        mapped[part] = handle
        memory[span] = 0xCD

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("unmap")
        memory, mapped, accessible, part, span = self._range(address, nbytes)
        assert mapped[part].all(), "unmapped what is not mapped"
        mapped[part], accessible[part], memory[span] = 0, False, 0xDD

    def set_access(self, address: int, nbytes: int) -> None:
        self._call("set_access")
        _, mapped, accessible, part, _ = self._range(address, nbytes)
        assert mapped[part].all(), "access to what is not mapped"
        accessible[part] = True

    def register(self, address: int, nbytes: int) -> int:
        self._call("register")
        if self.counts_memlock:
            raise OutOfMemory("register")
        self.registered[address] = nbytes
        return address

    def unregister(self, address: int) -> None:
        self._call("unregister")
        del self.registered[address]

    def allocate(self, nbytes: int) -> int:
        self._call("allocate")
        memory = np.zeros(nbytes + 8, np.uint8)
        self.allocations[memory.ctypes.data] = memory
        return memory.ctypes.data

    def deallocate(self, address: int) -> None:
        self._call("deallocate")
        del self.allocations[address]

    def new_stream(self) -> int:
        self._call("new_stream")
        self.streams[self._name()] = deque()
        return self._next - 1

    def synchronize(self, stream: int) -> None:
        self._call("synchronize")
        self.advance(stream)

    def new_event(self) -> int:
        self._call("new_event")
        self.events[self._name()] = 0
        return self._next - 1

    def record(self, event: int, stream: int) -> None:
        self._call("record")
        self.events[event] += 1
        self.recorded[event] = (self.recorded.get(event, (0, 0))[0] + 1, stream)

        def reached() -> None:
            self.events[event] -= 1

        self.streams[stream].append(reached)

    def stream_wait(self, stream: int, event: int) -> None:
        self._call("stream_wait")
        records, other = self.recorded.get(event, (0, 0))

        def wait() -> None:
            while self.recorded.get(event, (0, 0))[0] - self.events[event] < records:
                assert self.streams[other], "waits for an event that nothing will reach"
                self.advance(other, 1)

        self.streams[stream].append(wait)

    def done(self, event: int) -> bool:
        self._call("done")
        return self.events[event] == 0

    def wait(self, event: int) -> None:
        self._call("wait")
        for stream in self.streams:
            while self.events[event] and self.streams[stream]:
                self.advance(stream, 1)

    def copy(self, to: Addresses, source: Addresses, nbytes: int, stream: int) -> None:
        self._call("copy")
        pairs = list(zip(to.tolist(), source.tolist(), strict=True))
        self._random.shuffle(pairs)
        for target, origin in pairs:
            self.streams[stream].append(lambda t=target, o=origin: self._move(t, o, nbytes))

    def capturing(self, stream: int) -> bool:
        self._call("capturing")
        assert stream in self.streams
        return self.capture

    def tensor(self, address: int, nbytes: int) -> Any:
        import torch

        return torch.from_numpy(self.bytes_at(address, nbytes))

    def close(self) -> None:
        self.events.clear()

    def launch(self, stream: int, work: Callable[[], None]) -> None:
        """Enqueue a kernel."""
        self.streams[stream].append(work)

    def advance(self, stream: int, operations: int | None = None) -> None:
        """Run what is enqueued on a stream, or only its first `operations`."""
        queue = self.streams[stream]
        with self._running:  # the loader waits from several threads
            while queue and operations != 0:
                queue.popleft()()
                operations = None if operations is None else operations - 1

    def bytes_at(self, address: int, nbytes: int) -> np.ndarray:
        """The memory a kernel would reach; AssertionError where it would fault."""
        for memory, _, accessible in self.reservations.values():
            start = address - memory.ctypes.data
            if 0 <= start < len(memory):
                first, last = start // self._granularity, (start + nbytes - 1) // self._granularity
                assert accessible[first : last + 1].all(), "illegal address: not mapped"
                return memory[start : start + nbytes]
        for start, memory in self.allocations.items():
            if start <= address and address + nbytes <= start + len(memory):
                return memory[address - start : address - start + nbytes]
        for start, size in self.registered.items():
            if start <= address and address + nbytes <= start + size:
                return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))
        raise AssertionError("illegal address: neither device memory nor registered")

    def leaks(self) -> dict[str, int]:
        """What is still held, by kind; empty when everything was given back."""
        held = {
            "handles": len(self.handles),
            "reservations": len(self.reservations),
            "registered": len(self.registered),
            "allocations": len(self.allocations),
        }
        return {kind: n for kind, n in held.items() if n}

    def _move(self, to: int, source: int, nbytes: int) -> None:
        self.bytes_at(to, nbytes)[:] = self.bytes_at(source, nbytes)

    def _range(self, address: int, nbytes: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, slice, slice]:
        for memory, mapped, accessible in self.reservations.values():
            start = address - memory.ctypes.data
            if 0 <= start < len(memory):
                assert start % self._granularity == 0 and nbytes % self._granularity == 0
                part = slice(start // self._granularity, (start + nbytes) // self._granularity)
                return memory, mapped, accessible, part, slice(start, start + nbytes)
        raise AssertionError("not a reserved address")

    def _name(self) -> int:
        self._next += 1
        return self._next - 1

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if self.fail_at is not None:
            self.fail_at -= 1
            if self.fail_at < 0:
                self.fail_at = None
                raise OutOfMemory(name)
