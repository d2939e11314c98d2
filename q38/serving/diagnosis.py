"""Why a server died, from its exit status and its log."""

from __future__ import annotations

import re
import signal

_OURS = re.compile(r"^q38: (?P<message>.+)$")
# The last line of a Python traceback: `module.SomeError: message`.
_EXCEPTION = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b.*$")
_TROUBLE = re.compile(r"error|fatal|out of memory|killed|abort|cannot|failed|crashed", re.IGNORECASE)
# From sglang_ext.finite; what follows in the log comes of it.
_NOT_FINITE = re.compile(r"q38: (?P<message>not finite: .+)$")
# SGLang refused a request; asked itself to freeze its garbage collector before it listened, as it does without a warm-up.
_HARMLESS = ("[http_server] Error", "/freeze_gc")
# SGLang when one of its processes ends; it then kills itself and the others.
_CRASHED = re.compile(r"Subprocess (?P<name>\w+) \(pid=\d+\) crashed with exit code (?P<code>-?\d+)")
_GIVING_UP = "SIGQUIT received"


def telling_lines(log: str, *, most: int = 3, or_last: bool = True) -> list[str]:
    """The lines of a log that say what went wrong: our own refusal, else the first value that is not finite, else
    exceptions, else what sounds like trouble, else with `or_last` the last lines."""
    lines = [
        line.strip()
        for line in log.splitlines()
        if line.strip() and not any(harmless in line for harmless in _HARMLESS)
    ]
    if ours := [match["message"] for line in lines if (match := _OURS.match(line))]:
        return ours[-1:]
    if causes := [match["message"] for line in lines if (match := _NOT_FINITE.search(line))]:
        return causes[:1]
    for pattern in (_EXCEPTION, _TROUBLE):
        found = [line for line in lines if pattern.search(line)]
        if found:
            return found[-most:]
    return lines[-most:] if or_last else []


def describe_end(returncode: int, log: str) -> tuple[str, int]:
    """Why a server that had started ended, in words, and the exit status that counts: that of the process that failed first."""
    if returncode != -signal.SIGKILL:
        return describe_exit(returncode), returncode
    crashed = _CRASHED.search(log)
    if crashed is not None:
        code = int(crashed["code"])
        return f"its process {crashed['name']}: {describe_exit(code)}", code
    if _GIVING_UP in log:
        return "it ended itself after a failure", 3 if "OutOfMemoryError" in log else 1
    return describe_exit(returncode), returncode


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
