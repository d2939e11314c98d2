"""The server gets a systemd scope with a memory limit where systemd makes one. systemd itself is a script here."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from q38.serving import scope, sglang_plan
from q38.serving.child import Child
from q38.serving.engines import ServeOptions
from q38.serving.machine import Gpu
from q38.serving.sglang_engine import launch
from q38.serving.sglang_settings import SglangSettings

GIB = 2**30
# As systemd-run --scope: becomes the command behind "--".
RUNS = """#!/bin/sh
echo "$@" >> "$0.log"
while [ "$1" != "--" ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def systemd_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    program = tmp_path / "systemd-run"
    program.write_text(RUNS)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    scope._works.cache_clear()
    yield program
    scope._works.cache_clear()


def test_the_command_runs_in_a_scope_with_its_limit(systemd_run: Path, tmp_path: Path) -> None:
    command = scope.scoped([sys.executable, "-c", "import os; print(os.getpid(), os.getpgrp())"], 7 * GIB)
    assert command is not None
    child = Child(command, log=tmp_path / "log")
    assert child.wait(30) == 0
    assert child.log_text().split() == [str(child.pid)] * 2
    child.stop()
    told = (tmp_path / "systemd-run.log").read_text()
    assert f"MemoryMax={7 * GIB}" in told and "--scope" in told
    assert ("--user" in told) == (os.geteuid() != 0)


@pytest.mark.parametrize("fault", ["absent", "fails", "hangs"])
def test_without_systemd_the_command_is_as_it_was(
    systemd_run: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    if fault == "absent":
        monkeypatch.setenv("PATH", "/nowhere")
    systemd_run.write_text({"fails": "#!/bin/sh\nexit 1\n"}.get(fault, "#!/bin/sh\nsleep 60\n"))
    monkeypatch.setattr(scope, "_TRIAL_S", 0.2)
    assert scope.scoped(["true"], GIB) is None


def test_a_gpu_server_is_started_inside_one(
    systemd_run: Path, tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Gpu("card", "12.0", 24 * GIB, 23 * GIB, "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 30 * GIB)
    made = launch(
        ServeOptions(tiny_packed, tiny_ple, port=7, sglang=SglangSettings(context=1024, ram=20 * GIB))
    )
    assert made.command[0] == str(systemd_run) and f"--property=MemoryMax={20 * GIB}" in made.command
    assert "host memory: 20.0 GiB at most, by a systemd scope" in made.plan
    on_cpu = launch(
        ServeOptions(tiny_packed, tiny_ple, port=7, sglang=SglangSettings(context=1024, device="cpu"))
    )
    assert on_cpu.command[0] == sys.executable
