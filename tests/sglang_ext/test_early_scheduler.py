"""SGLang's scheduler in an interpreter that was started before it: the same process, or the standard one in its place."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import spawn
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from q38.base import settings
from q38.base.units import GIB
from q38.serving import sglang_plan
from q38.serving.engines import ServeOptions
from q38.serving.launch import running_server
from q38.serving.machine import Gpu
from q38.serving.sglang_engine import launch
from q38.serving.sglang_settings import SglangSettings
from q38.sglang_ext import early_scheduler
from q38.sglang_ext.early_process import Unanswered
from q38.sglang_ext.options import ExtensionOptions
from tests.sglang_ext import early_target
from tests.sglang_ext.conftest import missing
from tests.sglang_ext.early_checks import MODULE, SPAWN, TARGET, children, gone, nothing_stays, until

OPTIONS = ExtensionOptions("model", early_scheduler=True)


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with nothing_stays():
        yield


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' `report` stands for SGLang's scheduler, a small module for its modules."""
    monkeypatch.setattr(early_scheduler, "_SCHEDULER", (TARGET, "report"))
    monkeypatch.setattr(early_scheduler, "PRELOAD", (MODULE,))


def reported(*ranks: int) -> dict[str, Any]:
    """Start `report` as SGLang starts its scheduler, and what it tells."""
    reader, writer = SPAWN.Pipe(duplex=False)
    process = SPAWN.Process(target=early_target.report, args=("server", "ports", 0, *ranks, writer))
    process.start()
    writer.close()
    with reader:
        told: dict[str, Any] = reader.recv()
    process.join(60)
    assert process.exitcode == 0
    assert told["pid"] == process.pid and told["parent"] == os.getpid() and told["alive"]
    assert told["name"] == process.name
    assert told["arguments"] == ("server", "ports", 0, *ranks)
    process.close()
    return told


@pytest.mark.usefixtures("scheduler")
def test_the_first_scheduler_runs_in_the_interpreter_that_waits(capfd: pytest.CaptureFixture[str]) -> None:
    waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    with early_scheduler.taken_over(waiting):
        early, standard = reported(0, 0), reported(0, 0)
    assert early["pid"] == waiting.pid != standard["pid"]
    assert MODULE in early["modules"] and MODULE not in standard["modules"]
    assert early["argv"] == standard["argv"] == sys.argv
    assert early["path"] == standard["path"]
    assert early["directory"] == standard["directory"]
    log = capfd.readouterr().err
    assert re.search(
        r"^q38: scheduler's modules imported, .* s after the start\nq38: scheduler takes over, ", log, re.M
    )


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("ranks", [(1, 0), (0, 1)])
def test_another_rank_is_started_by_sglang_itself(ranks: tuple[int, int]) -> None:
    waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    with early_scheduler.taken_over(waiting):
        assert reported(*ranks)["pid"] != waiting.pid
        assert reported(0, 0)["pid"] == waiting.pid


def test_another_process_is_started_by_sglang_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_scheduler, "PRELOAD", ())
    waiting = early_scheduler.start(OPTIONS)
    with early_scheduler.taken_over(waiting):
        assert waiting is not None and reported(0, 0)["pid"] != waiting.pid
        assert waiting.pid in children()
    assert waiting.pid not in children()


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("before", [{}, {"SGLANG_RUN_ID": "old"}], ids=str)
def test_variables_that_are_read_late_are_brought_over(before: dict[str, str]) -> None:
    with settings.exported(before):
        waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    now = dict.fromkeys(early_scheduler.CARRIED, "of now \udc80")
    with early_scheduler.taken_over(waiting), sglang_environment(now):
        told = reported(0, 0)
    assert told["pid"] == waiting.pid
    assert now.items() <= told["environment"].items()


def sglang_environment(more: dict[str, str]) -> Any:
    return settings.exported(early_scheduler._DEFAULTS | early_scheduler._SET | more)


@pytest.fixture(autouse=True)
def as_sglang_leaves_it(request: pytest.FixtureRequest) -> Iterator[None]:
    """The environment and the limits that SGLang has set by the time it starts its scheduler."""
    before = {kind: resource.getrlimit(kind) for kind in (resource.RLIMIT_STACK, resource.RLIMIT_CORE)}
    with sglang_environment({}), early_scheduler._limits():
        yield
    for kind, limits in before.items():
        assert resource.getrlimit(kind) == limits


@pytest.mark.usefixtures("scheduler")
def test_the_interpreter_starts_with_what_sglang_sets_later(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in early_scheduler._DEFAULTS | early_scheduler._SET:
        monkeypatch.delenv(name)
    before = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (2**23, before[1]))
    monkeypatch.setenv("NCCL_CUMEM_ENABLE", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    assert resource.getrlimit(resource.RLIMIT_STACK)[0] == 2**23
    ours = settings.child_env()
    assert "NCCL_NVLS_ENABLE" not in ours and ours["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    resource.setrlimit(resource.RLIMIT_STACK, before)
    with early_scheduler.taken_over(waiting), sglang_environment({"NCCL_CUMEM_ENABLE": "1"}):
        told = reported(0, 0)
    assert told["pid"] == waiting.pid
    assert told["stack"][0] == before[0] > 2**23
    assert told["environment"]["NCCL_CUMEM_ENABLE"] == "1"
    assert told["environment"]["CUDA_DEVICE_MAX_CONNECTIONS"] == "8"


def _variable(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.setenv("OMP_NUM_THREADS", "1")


def _removed(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.delenv("CUTE_DSL_LOG_LEVEL")


def _directory(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    patch.chdir(tmp_path)


def _executable(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    patch.setattr(spawn, "_python_exe", os.fsencode(wrapper))


def _cores(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _limit(patch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    resource.setrlimit(resource.RLIMIT_STACK, (early_scheduler._STACK + 4096, hard))


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (_variable, "changed since: OMP_NUM_THREADS"),
        (_removed, "changed since: CUTE_DSL_LOG_LEVEL"),
        (_directory, "its directory differs"),
        (_executable, "its command differs"),
        (_cores, "its cores differ"),
        (_limit, "its limits differ"),
    ],
)
def test_where_a_new_process_would_differ_the_standard_one_is_started(
    change: Callable[[pytest.MonkeyPatch, Path], None],
    told: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cores, stack = os.sched_getaffinity(0), resource.getrlimit(resource.RLIMIT_STACK)
    waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    with early_scheduler.taken_over(waiting), pytest.MonkeyPatch.context() as patch:
        change(patch, tmp_path)
        try:
            found = reported(0, 0)
        finally:
            os.sched_setaffinity(0, cores)
            resource.setrlimit(resource.RLIMIT_STACK, stack)
        assert waiting.pid not in children()
    assert found["pid"] != waiting.pid and MODULE not in found["modules"]
    assert f"q38: the early scheduler is not used: {told}\n" in capfd.readouterr().err


@pytest.mark.usefixtures("scheduler")
@pytest.mark.parametrize("reaped", [False, True])
def test_a_dead_interpreter_is_replaced_by_the_standard_one(
    reaped: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    os.kill(waiting.pid, signal.SIGKILL)
    if reaped:
        os.waitpid(waiting.pid, 0)
    else:
        until(lambda: gone(psutil.Process(waiting.pid)))
    with early_scheduler.taken_over(waiting):
        assert MODULE not in reported(0, 0)["modules"]
    assert "q38: the early scheduler is not used: it has ended\n" in capfd.readouterr().err


@pytest.mark.parametrize("preload", ["", f"{TARGET}:linger"], ids=["waiting", "importing"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_quietly_with_the_process_that_started_it(preload: str, number: signal.Signals) -> None:
    code = (
        "import time\nfrom q38.sglang_ext import early_scheduler\nfrom q38.sglang_ext.options import ExtensionOptions\n"
        f"early_scheduler.PRELOAD = {[preload] if preload else []}\n"
        "waiting = early_scheduler.start(ExtensionOptions('model', early_scheduler=True))\n"
        "print(waiting.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert parent.stdout is not None and parent.stderr is not None
    child = psutil.Process(int(parent.stdout.readline()))
    assert os.getpgid(child.pid) == os.getpgid(parent.pid)
    if not preload:
        assert b"modules imported" in parent.stderr.readline()
    parent.send_signal(number)
    try:
        assert parent.stderr.read() == b""  # until the child has closed it
        until(lambda: gone(child))
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
        parent.stderr.close()


@pytest.mark.usefixtures("scheduler")
def test_without_a_scheduler_it_ends_with_the_server() -> None:
    waiting = early_scheduler.start(OPTIONS)
    assert waiting is not None
    with pytest.raises(ValueError, match="refused"), early_scheduler.taken_over(waiting):
        assert waiting.pid in children()
        raise ValueError("refused")
    assert waiting.pid not in children()
    with pytest.raises(Unanswered):
        waiting.hand_over([])


@pytest.mark.parametrize(
    ("device", "given", "early"),
    [("cpu", None, False), ("cpu", True, True), ("cuda", None, True), ("cuda", False, False)],
)
def test_q38_serve_wants_one_on_a_gpu(
    tiny_packed: Path,
    tiny_ple: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    given: bool | None,
    early: bool,
) -> None:
    card = Gpu("card", "12.0", 24 * GIB, 23 * GIB, "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 30 * GIB)
    asked = SglangSettings(device=device, context=1024, early_scheduler=given)
    found = launch(ServeOptions(tiny_packed, tiny_ple, port=7, sglang=asked)).environment[settings.SGLANG]
    assert ExtensionOptions.from_json(found).early_scheduler == early


def test_none_is_started_unless_it_is_wanted_and_has_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    assert early_scheduler.start(ExtensionOptions("model")) is None
    monkeypatch.setenv("Q38_THREADS", "1")
    assert early_scheduler.start(OPTIONS) is None
    assert children() == before
    with early_scheduler.taken_over(None):
        pass


def test_sglangs_scheduler_runs_in_it_with_every_hook(tiny_packed: Path, tiny_ple: Path) -> None:
    """And its death ends the server, as ever."""
    if why := missing():
        pytest.skip(why)
    options = SglangSettings(device="cpu", context=256, early_scheduler=True)
    with running_server(tiny_packed, ple=tiny_ple, engine="sglang", sglang=options) as server:
        log = server.log.read_text()
        imported = re.search(r"^q38: scheduler's modules imported, ([\d.]+) s after the start$", log, re.M)
        assert imported and "q38: scheduler takes over, " in log
        process = psutil.Process(server.pid)
        (scheduler,) = (p for p in process.children() if "sglang::scheduler" in " ".join(p.cmdline()))
        # SGLang itself would start it after its own imports.
        assert scheduler.create_time() - process.create_time() < float(imported[1])
        answer = httpx.get(f"{server.url}/q38/residency", timeout=60)  # from the hooks of the engine
        assert answer.status_code == 200 and "rows" in answer.text
        scheduler.kill()
        until(lambda: gone(process))
        assert f"scheduler_0 (pid={scheduler.pid}) crashed with exit code -9" in server.log.read_text()
