"""What the tests of early_process run in the process that they start: its own account of itself."""

from __future__ import annotations

import multiprocessing
import os
import resource
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from q38.base import settings


def report(*arguments: Any) -> None:
    """To the pipe behind the last argument: who and how this process is."""
    pipe: Connection = arguments[-1]
    parent = multiprocessing.parent_process()
    assert parent is not None
    pipe.send(
        {
            "pid": os.getpid(),
            "parent": parent.pid,
            "alive": parent.is_alive(),
            "name": multiprocessing.current_process().name,
            "modules": sorted(sys.modules),
            "environment": settings.child_env(),
            "directory": str(Path.cwd()),
            "stack": resource.getrlimit(resource.RLIMIT_STACK),
            "argv": sys.argv,
            "path": sys.path,
            "arguments": arguments[:-1],
        }
    )
    pipe.close()


def answer(questions: Connection, answers: Connection) -> None:
    answers.send(f"{questions.recv()}, yes")


def leave(code: int) -> None:
    sys.exit(code)


def fail() -> None:
    raise ValueError("on purpose")


def linger() -> None:
    time.sleep(600)


def outlive(file: str) -> None:
    """Say that this process runs, then whether it saw its parent's end."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    Path(file).write_text("runs")
    parent.join()
    Path(file).write_text("saw it")
