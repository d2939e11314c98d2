"""Why a server died, from its exit status and its log."""

from __future__ import annotations

import re
import signal

_OURS = re.compile(r"^q38: (?P<message>.+)$")
# The last line of a Python traceback: `module.SomeError: message`.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*$")
_TROUBLE = re.compile(r"error|fatal|out of memory|killed|abort|cannot|failed", re.IGNORECASE)


def telling_lines(log: str, *, most: int = 3) -> list[str]:
    """The lines of a log that say what went wrong: our own refusal, else exceptions, else what sounds like
    trouble, else the last lines."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    ours = [match["message"] for line in lines if (match := _OURS.match(line))]
    if ours:
        return ours[-1:]
    for pattern in (_EXCEPTION, _TROUBLE):
        found = [line for line in lines if pattern.search(line)]
        if found:
            return found[-most:]
    return lines[-most:]


def describe_exit(returncode: int) -> str:
    """Exit status in words; a signal by its name, SIGKILL with its usual cause."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    usual = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
    return f"killed by {name}{usual}"
