"""How long ago the server was started: for log lines that processes of one server can be compared by."""

from __future__ import annotations

import os
import time

import psutil


def since_start() -> float:
    """Seconds since the leader of this process group began: the server's first process. 0 where it is gone."""
    try:
        return time.time() - psutil.Process(os.getpgrp()).create_time()
    except psutil.Error:
        return 0.0


def at(what: str) -> str:
    """`what`, and when it happened."""
    return f"{what}, {since_start():.1f} s after the start"
