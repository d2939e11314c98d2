"""The refusals of q38. Each is one line: where, what is wrong, and the remedy."""

from __future__ import annotations

from pathlib import Path


class Q38Error(Exception):
    """A failure that the user can act on.

    Args:
        what: what is wrong, without a trailing full stop.
        where: the file, tensor, key or option at fault.
        remedy: what the user can do about it, in the imperative.
    """

    exit_code = 1

    def __init__(self, what: str, *, where: str | Path | None = None, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.where = None if where is None else str(where)
        self.remedy = remedy

    def __str__(self) -> str:
        head = f"{self.where}: {self.what}" if self.where else self.what
        text = f"{head}. {_sentence(self.remedy)}" if self.remedy else f"{head}."
        return " ".join(text.split())

    def to_dict(self) -> dict[str, object]:
        """The same refusal for `--json`."""
        return {
            "error": {
                "kind": type(self).__name__,
                "what": self.what,
                "where": self.where,
                "remedy": self.remedy,
                "exit_code": self.exit_code,
            }
        }


def _sentence(text: str) -> str:
    """Capital first letter and full stop, except where a command or an option comes first."""
    start = text if text.startswith(("q38 ", "-")) else text[:1].upper() + text[1:]
    return start if start.endswith(("?", ".")) else start + "."


class CheckFailed(Q38Error):
    """The check ran and says no (exit code 1)."""

    exit_code = 1


class InputError(Q38Error):
    """Bad input or usage (exit code 2)."""

    exit_code = 2


class ResourceError(Q38Error):
    """It does not fit, or something the machine needs is missing (exit code 3)."""

    exit_code = 3
