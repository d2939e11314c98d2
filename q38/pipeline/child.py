"""One step as a child process: its JSON document, its time, the memory of its process tree."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from q38.base import settings
from q38.base.errors import Q38Error

_INTERVAL = 0.2  # seconds between two samples of the memory
_SURVEY = 5  # samples between two looks for new processes, which cost more than the sample
_INTERRUPT = 5.0  # seconds a child gets to end by itself after Ctrl-C
_GRACE = 30.0  # seconds it gets after SIGTERM


@dataclass(frozen=True)
class Outcome:
    """How a child ended. `document` is what it printed with --json, None if that was no JSON object."""

    exit_code: int
    document: dict[str, Any] | None
    seconds: float
    peak_memory: int


class StepFailed(Q38Error):
    """A step did not end well. The exit code is the child's: 1 a check said no, 2 bad input, 3 a shortage."""

    def __init__(self, step: str, outcome: Outcome) -> None:
        error = (outcome.document or {}).get("error") or {}
        remedy = error.get("remedy") or "see the lines above; the same command goes on from here"
        self.document = outcome.document
        self.exit_code = outcome.exit_code if outcome.exit_code in (1, 2, 3, 130) else 1
        if outcome.exit_code == -signal.SIGKILL:
            self.exit_code = 3
            what = "was killed by the system, most often for want of memory"
            remedy = "free memory or make the recipe smaller; the same command goes on from here"
        elif outcome.exit_code < 0:
            what = f"was ended by signal {-outcome.exit_code}"
        elif error:
            place = f" ({error['where']})" if error.get("where") else ""
            what = f"refused: {error.get('what')}{place}"
        elif outcome.exit_code == 1 and outcome.document is not None:
            what, remedy = "says no", "read the rows above and the report"
        else:
            what = f"ended with exit code {outcome.exit_code} and no result"
        super().__init__(what, where=f"step {step}", remedy=remedy)


def command_line(args: Sequence[str]) -> str:
    """The command as one types it."""
    return shlex.join(["python", "-m", "q38", *args, "--json"])


def start(args: Sequence[str]) -> subprocess.Popen[str]:
    """Start `python -m q38 ARGS --json`; stdout is a pipe, stderr is ours.

    The child ends when this process does. Libraries in it use the cores this process may use, and no hub.
    """
    extra = {
        settings.PARENT: str(os.getpid()),
        "OMP_NUM_THREADS": str(settings.omp_threads()),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "q38", *args, "--json"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env=settings.child_env(extra),
        text=True,
    )


def run(args: Sequence[str]) -> Outcome:
    """Run one command to its end. On Ctrl-C the child is waited for, then the interrupt goes on."""
    begun = time.monotonic()
    child = start(args)
    memory = MemorySampler(child.pid)
    try:
        text, _ = child.communicate()
    except KeyboardInterrupt:
        with suppress(subprocess.TimeoutExpired):
            child.wait(_INTERRUPT)  # the terminal interrupted it as well
        raise
    finally:
        stop(child)
        memory.stop()
    return Outcome(child.returncode, parse_document(text), time.monotonic() - begun, memory.peak)


def parse_document(text: str) -> dict[str, Any] | None:
    """The JSON object in a verb's output."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def stop(child: subprocess.Popen[str]) -> int:
    """Ask a child to end, wait, and kill it if it does not. Returns its exit code."""
    if child.poll() is None:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
    return child.wait()


class MemorySampler:
    """Peak resident memory of a process and its descendants, in bytes; samples until `stop`.

    RSS is summed over the tree, sampled every 0.2 s, new processes looked for every second; pages that
    processes share count once for each.
    """

    def __init__(self, pid: int) -> None:
        self.peak = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the sampling and return the peak."""
        self._ended.set()
        self._thread.join()
        return self.peak

    def _sample(self) -> None:
        for count in itertools.count():
            if count % _SURVEY == 0:
                processes = process_tree(self._pid)
            self.peak = max(self.peak, resident_memory(processes))
            if self._ended.wait(_INTERVAL):
                return


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def resident_memory(processes: Sequence[psutil.Process]) -> int:
    """Resident bytes of these processes at this moment; one that has ended counts 0."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_info().rss
    return total
