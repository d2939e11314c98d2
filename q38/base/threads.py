"""Work on files spread over threads, with one progress bar. hashlib and reads release the interpreter's lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from typing import TypeVar

from q38.base.progress import Progress, Task

Advance = Callable[[int], None]
T = TypeVar("T")


class Stopped(Exception):
    """Raised in a worker when the work has been given up."""


class Meter:
    """Counts the bytes of all workers on one task, and stops them: a worker in a large file hears of it here."""

    def __init__(self, task: Task) -> None:
        self._task, self._lock, self._stopped = task, threading.Lock(), False

    def __call__(self, n: int) -> None:
        if self._stopped:
            raise Stopped
        with self._lock:
            self._task.advance(n)

    def stop(self) -> None:
        self._stopped = True


def spread(
    calls: Mapping[str, Callable[[Advance], T]],
    done: Callable[[str, T], None],
    *,
    label: str,
    total: int,
    workers: int,
    progress: Progress,
) -> None:
    """Run every call in one of `workers` threads, and `done(key, result)` in this one as they end, in any order.

    The first error stops all and is raised.

    Args:
        calls: each is given a function to report bytes to.
        total: bytes of all calls.
    """
    with progress.task(label, total) as task, ThreadPoolExecutor(workers) as pool:
        meter = Meter(task)
        futures = {pool.submit(call, meter): key for key, call in calls.items()}
        try:
            for future in as_completed(futures):
                done(futures[future], future.result())
        except BaseException:
            meter.stop()
            pool.shutdown(wait=True, cancel_futures=True)
            raise


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """torch works with one thread inside: what is spread over threads is whole matrices, not their pieces."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
