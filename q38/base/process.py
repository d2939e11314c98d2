"""Tie a process to the one that started it, so that a killed `q38 run` leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(pid: int) -> None:
    """Let the kernel send this process SIGTERM when its parent `pid` dies, kill -9 included.

    Does nothing where the system has no such call (other than Linux), or when `pid` is 0.
    """
    if not pid or sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != pid:  # it died before the call
        raise SystemExit(128 + signal.SIGTERM)
