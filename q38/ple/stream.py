"""Ordered parallel reading: several chunks in flight, delivered in file order, memory bounded."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.base.settings import cpu_count
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.paths import reading

CHUNK = 2**20  # bytes per read: larger buffers are mapped and unmapped by the allocator each time
_READERS = 4
_ALIGN = 16  # bytes; no dtype is wider

Value = TypeVar("Value")


@dataclass(frozen=True)
class Piece(Generic[Value]):
    """One chunk of one tensor after `work`."""

    number: int
    tensor: TensorInfo
    start: int  # bytes from the tensor's first
    nbytes: int
    last: bool
    value: Value


def read_tensors(
    tensors: Mapping[int, TensorInfo], work: Callable[[NDArray[np.uint8]], Value], chunk: int = CHUNK
) -> Iterator[Piece[Value]]:
    """Read numbered tensors chunk by chunk; threads read and do `work`, the pieces come in order."""
    workers = min(_READERS, max(2, cpu_count()))
    step = max(chunk // _ALIGN, 1) * _ALIGN
    pending: deque[Future[Piece[Value]]] = deque()
    with ExitStack() as stack:
        files = {t.file: stack.enter_context(_open(t.file)) for t in tensors.values()}
        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="q38-read"))

        def piece(number: int, tensor: TensorInfo, start: int) -> Piece[Value]:
            stop = min(start + step, tensor.nbytes)
            value = work(read_range(files[tensor.file].fileno(), tensor, start, stop))
            return Piece(number, tensor, start, stop - start, stop == tensor.nbytes, value)

        try:
            for number, tensor in tensors.items():
                for start in range(0, tensor.nbytes, step):
                    pending.append(pool.submit(piece, number, tensor, start))
                    if len(pending) >= 2 * workers:
                        yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()


def _open(file: Path) -> FileIO:
    with reading(file):
        return file.open("rb", buffering=0)


def read_range(fd: int, tensor: TensorInfo, start: int, stop: int) -> NDArray[np.uint8]:
    """Bytes [start, stop) of a tensor from the open file that holds it.

    Raises:
        InputError: the file ends early, or the disk fails.
    """
    buffer = np.empty(stop - start, np.uint8)
    view, position = buffer.data, tensor.begin + start
    while len(view):
        with reading(tensor.file):
            n = os.preadv(fd, [view], position)
        if n == 0:
            raise InputError(
                f"the file ended inside tensor {tensor.name}",
                where=tensor.file,
                remedy="download the file again",
            )
        view, position = view[n:], position + n
    return buffer
