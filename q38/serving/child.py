"""The server's process: its own process group, its log file, and an end in every case."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from q38.base import settings
from q38.checkpoint.writer import writing

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
STOP_GRACE_S = 15.0  # the server gets this long to finish answers after SIGTERM


class Child:
    """A running server process.

    Its stdin is a pipe that this process holds open: q38.serving.watchdog ends the group when the pipe
    closes. Its output is appended to `log`; `log_start` is where this run begins there.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        log: Path,
        api_key: str | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start `command`, with `environment` beside this process's own variables.

        Raises:
            InputError: the log cannot be written.
        """
        with writing(log):
            log.parent.mkdir(parents=True, exist_ok=True)
            output = log.open("ab", buffering=0)
        self.log = log
        with output:
            output.write(f"$ {shlex.join(command)}\n".encode())
            self.log_start = output.tell()
            self._process = self._spawn(command, output, api_key, environment or {})
        self.pid = self._process.pid

    @staticmethod
    def _spawn(
        command: Sequence[str], output: IO[bytes], api_key: str | None, environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        # The key travels by environment: a command line is visible to every user of the machine.
        env = settings.child_env(
            {**environment, **({"Q38_API_KEY": api_key} if api_key else {})},
            drop=("Q38_API_KEY", "OPENAI_API_KEY"),
        )
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**env, "PYTHONUNBUFFERED": "1"},
        )

    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def log_text(self, limit: int = 2**16) -> str:
        """What this run wrote to the log, at most the last `limit` bytes; without the codes of colours."""
        with self.log.open("rb") as f:
            size = f.seek(0, os.SEEK_END)
            f.seek(max(self.log_start, size - limit))
            return _COLOUR.sub("", f.read().decode("utf-8", errors="replace"))

    def forget_log(self) -> None:
        """Let `log_text` begin here: what was written before is of no interest any more."""
        self.log_start = self.log.stat().st_size

    def wait(self, timeout_s: float) -> int | None:
        """Wait up to `timeout_s` for the end; the exit status, or None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        return self.returncode()

    def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """End the whole group: SIGTERM, then SIGKILL after `grace_s`. A second Ctrl-C kills at once."""
        try:
            if self.returncode() is None:
                self._process.terminate()
                self.wait(grace_s)
        finally:
            kill_group(self.pid)
            self._process.wait()
            if self._process.stdin is not None:
                self._process.stdin.close()


def kill_group(pid: int) -> None:
    """SIGKILL to every process of the group that `pid` leads; nothing if it is gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def wait_for_exit(pid: int, timeout_s: float) -> bool:
    """Wait until a process that is not our child is gone (or a zombie); False after `timeout_s`."""
    import psutil

    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False
