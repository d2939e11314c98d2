"""What the tests of early_process and early_scheduler share."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path
from typing import Any

import psutil
import pytest

from q38.sglang_ext import early_process
from q38.sglang_ext.early_process import Waiting
from tests.sglang_ext import early_target

TARGET = early_target.__name__
SPAWN: SpawnContext = multiprocessing.get_context("spawn")
MODULE = "colorsys"  # small, and imported by nothing else


@contextmanager
def nothing_stays() -> Iterator[None]:
    """In the tests' root, where children find them. Neither a process stays nor the change of multiprocessing, and no descriptor."""
    multiprocessing.resource_tracker.getfd()  # type: ignore[attr-defined]  # stays
    before = vars(SpawnProcess)["_Popen"], children(), descriptors()
    with chdir(Path(__file__).parents[2]):
        yield
    assert (vars(SpawnProcess)["_Popen"], children(), descriptors()) == before


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def children() -> set[int]:
    """Also those that have ended and nobody took note of."""
    return {child.pid for child in psutil.Process().children()}


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def run(target: Callable[..., None], *arguments: Any, waiting: Waiting) -> Any:
    """A process in the interpreter that waits."""
    process = SPAWN.Process(target=target, args=arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SpawnProcess, "_Popen", staticmethod(lambda p: early_process.Popen(p, waiting)))
        process.start()
    assert process.pid == waiting.pid
    return process
