"""How long steps report progress. Library code takes a `Progress`; the CLI supplies one that draws it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Task(Protocol):
    """One running piece of work."""

    def advance(self, n: float) -> None:
        """Report `n` more units done."""

    def note(self, text: str) -> None:
        """Replace the short text beside the bar (the file or block in hand)."""


class Progress(Protocol):
    """Where tasks are drawn."""

    def task(
        self, label: str, total: float | None, unit: str = "B", done: float = 0
    ) -> AbstractContextManager[Task]:
        """Open a task.

        Args:
            label: what is done.
            total: units in all, None if not known.
            unit: "B" shows bytes, bytes/s and ETA; any other word counts that thing.
            done: units that an earlier process did; they count, but say nothing about the rate.
        """

    def say(self, text: str) -> None:
        """One line that stays, on stderr."""


class _SilentTask:
    def advance(self, n: float) -> None:
        del n

    def note(self, text: str) -> None:
        del text


class _Silent:
    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "B", done: float = 0) -> Iterator[Task]:
        del label, total, unit, done
        yield _SilentTask()

    def say(self, text: str) -> None:
        del text


SILENT: Progress = _Silent()
