"""Appending to a file while one thread hashes what was written and another makes it durable."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

_UNHASHED = 8  # chunks that may wait for the hash


class Appender:
    """Writes at the current position of `fd`. Use as a context manager; leaving it waits for everything.

    Args:
        fd: open for writing, unbuffered.
        digest: hashlib object, already fed with what lies before the current position.
    """

    def __init__(self, fd: int, digest: Any) -> None:
        self._fd, self._digest = fd, digest
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="q38-hash")
        self._syncer = ThreadPoolExecutor(1, thread_name_prefix="q38-sync")
        self._hashing: deque[Future[None]] = deque()
        self._syncing: Future[None] | None = None

    def __enter__(self) -> Appender:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self._wait()
        finally:
            self._hasher.shutdown(cancel_futures=True)
            self._syncer.shutdown(cancel_futures=True)

    def write(self, data: NDArray[np.uint8]) -> None:
        """Write all of `data` and queue it for the hash."""
        view = data.data
        while len(view):
            view = view[os.write(self._fd, view) :]
        self._hashing.append(self._hasher.submit(self._digest.update, data))
        if len(self._hashing) > _UNHASHED:
            self._hashing.popleft().result()

    def then(self, action: Callable[[str], None]) -> None:
        """Call `action(sha256 so far)` once everything written so far is on disk. Waits for the action before it."""
        if self._syncing is not None:
            self._syncing.result()
        sha256 = self._hasher.submit(lambda: str(self._digest.copy().hexdigest()))
        self._syncing = self._syncer.submit(self._sync, sha256, action)

    def _sync(self, sha256: Future[str], action: Callable[[str], None]) -> None:
        os.fdatasync(self._fd)
        action(sha256.result())

    def _wait(self) -> None:
        for future in self._hashing:
            future.result()
        if self._syncing is not None:
            self._syncing.result()
