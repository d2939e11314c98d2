"""Rows move after one step of the model was enqueued and before the next is, never inside one (steps.py says why that is enough)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Gate:
    """Keeps steps and moves apart. A move that waits goes before the next step, so a busy server cannot starve it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._stepping = self._moving = False
        self._moves = 0  # waiting or under way

    @contextmanager
    def step(self) -> Iterator[None]:
        """One step of the model. Only one thread steps."""
        with self._changed:
            self._changed.wait_for(lambda: not self._moves)
            self._stepping = True
        try:
            yield
        finally:
            with self._changed:
                self._stepping = False
                self._changed.notify_all()

    @contextmanager
    def move(self) -> Iterator[None]:
        """One change of the rows. Several threads may ask; one moves at a time."""
        with self._changed:
            self._moves += 1
            self._changed.wait_for(lambda: not (self._stepping or self._moving))
            self._moving = True
        try:
            yield
        finally:
            with self._changed:
                self._moves -= 1
                self._moving = False
                self._changed.notify_all()
