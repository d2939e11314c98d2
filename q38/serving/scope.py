"""A systemd scope of its own for the server, with a memory limit: what is too much ends the server, not the desktop beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

_TRIAL_S = 10.0


def scoped(command: Sequence[str], limit: int) -> list[str] | None:
    """`command` inside a scope of at most `limit` bytes of host memory; None where systemd makes none for this user.

    systemd-run becomes the command: process id, process group and pipes stay as they are.
    """
    words = _run(limit)
    return [*words, *command] if words and _works(tuple(words)) else None


def _run(limit: int) -> list[str] | None:
    program = shutil.which("systemd-run")
    if program is None:
        return None
    whose = [] if os.geteuid() == 0 else ["--user"]
    return [program, *whose, "--scope", "--quiet", "--collect", f"--property=MemoryMax={limit}", "--"]


@lru_cache(maxsize=8)
def _works(words: tuple[str, ...]) -> bool:
    """Whether such a scope can be made: there may be no manager, no bus, no right to limit memory."""
    true = shutil.which("true") or str(Path("/bin/true"))
    try:
        return subprocess.run([*words, true], capture_output=True, timeout=_TRIAL_S).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False
