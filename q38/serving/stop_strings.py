"""Cuts a streamed text at its first stop string, without ever emitting a part of one."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Feed pieces of text, get what is safe to emit.

    The stop string that completes first ends the text; of two that complete together the one that
    starts earlier. The result does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit: str | None = None

    def feed(self, text: str) -> str:
        """What may be emitted now; nothing after `hit` is set."""
        if self.hit is not None:
            return ""
        buffer = self._held + text
        found = [(buffer.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if matches:
            _, start, self.hit = min(matches)
            self._held = ""
            return buffer[:start]
        keep = max((_overlap(buffer, stop) for stop in self._stops), default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """At the end of the text: what was held back because a stop string might have begun."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` with which `stop` begins, short of the whole `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
