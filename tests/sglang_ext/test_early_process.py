"""A process in an interpreter that was started before it: what can be told from a spawned one, and what must not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from pathlib import Path

import psutil
import pytest

from q38.base import settings
from q38.sglang_ext.early_process import Waiting
from tests.sglang_ext import early_target
from tests.sglang_ext.early_checks import MODULE, SPAWN, TARGET, gone, nothing_stays, run, until


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    with nothing_stays():
        yield


@pytest.mark.parametrize(
    ("target", "arguments", "code"), [("leave", (7,), 7), ("fail", (), 1), ("leave", (0,), 0)]
)
def test_its_exit_code_is_that_of_the_process(target: str, arguments: tuple[int, ...], code: int) -> None:
    process = run(getattr(early_target, target), *arguments, waiting=Waiting("test", ()))
    assert connection.wait([process.sentinel], 60) == [process.sentinel]
    process.join(60)
    assert process.exitcode == code
    process.close()


@pytest.mark.parametrize(("how", "number"), [("terminate", signal.SIGTERM), ("kill", signal.SIGKILL)])
def test_it_can_be_ended(how: str, number: int) -> None:
    process = run(early_target.linger, waiting=Waiting("test", ()))
    assert process.is_alive() and process.exitcode is None
    assert connection.wait([process.sentinel], 0.1) == []
    getattr(process, how)()
    process.join(60)
    assert process.exitcode == -number
    process.close()


def test_one_that_dies_as_it_is_handed_a_process_is_a_process_that_was_killed() -> None:
    class Dying(Waiting):
        def hand_over(self, numbers: Sequence[int]) -> None:
            os.kill(self.pid, signal.SIGSTOP)
            super().hand_over(numbers)
            os.kill(self.pid, signal.SIGKILL)
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)

    process = run(early_target.leave, 0, waiting=Dying("test", ()))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    process.close()


@pytest.mark.parametrize("preload", [(), ("no_such_module",)], ids=["in it", "in the one in its place"])
def test_each_descriptor_in_the_arguments_keeps_its_meaning(preload: tuple[str, ...]) -> None:
    (questions, ask), (tell, answers) = SPAWN.Pipe(duplex=False), SPAWN.Pipe(duplex=False)
    process = run(early_target.answer, questions, answers, waiting=Waiting("test", preload))
    ask.send("first the questions")
    assert tell.recv() == "first the questions, yes"
    process.join(60)
    process.close()
    for end in (questions, ask, tell, answers):
        end.close()


def test_killed_before_it_reads_it_is_a_process_that_was_killed() -> None:
    waiting = Waiting("test", ())
    os.kill(waiting.pid, signal.SIGSTOP)
    process = run(early_target.leave, 0, waiting=waiting)
    assert process.is_alive()
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    process.close()


def test_a_large_argument_comes_over_before_anyone_reads_it() -> None:
    reader, writer = SPAWN.Pipe(duplex=False)
    text = "x" * 500_000
    with reader:
        process = run(early_target.report, text, writer, waiting=Waiting("test", (MODULE,)))
        writer.close()
        assert reader.recv()["arguments"] == (text,)
    process.join(60)
    process.close()


@pytest.mark.parametrize(
    ("preload", "without"),
    [((MODULE, "no_such_module"), ()), ((MODULE,), (MODULE,)), ((MODULE, f"{TARGET}:fail"), ())],
    ids=["no module", "a module that must not be there", "a function that fails"],
)
def test_modules_that_are_of_no_use_are_imported_again_by_a_new_interpreter(
    preload: tuple[str, ...], without: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    waiting = Waiting("test", preload, without=without, carried={"SGLANG_RUN_ID"})
    reader, writer = SPAWN.Pipe(duplex=False)
    with reader, settings.exported({"SGLANG_RUN_ID": "7"}):
        process = run(early_target.report, writer, waiting=waiting)
        writer.close()
        told = reader.recv()
    assert told["pid"] == waiting.pid and told["parent"] == os.getpid() and told["alive"]
    assert MODULE not in told["modules"]
    assert told["environment"]["SGLANG_RUN_ID"] == "7"
    process.join(60)
    assert process.exitcode == 0
    process.close()
    log = capfd.readouterr().err
    assert "test's modules are of no use" in log and "Traceback" not in log


def test_the_process_in_it_sees_the_end_of_the_one_that_started_it(tmp_path: Path) -> None:
    file = tmp_path / "file"
    code = (
        "import multiprocessing, time\nfrom multiprocessing.context import SpawnProcess\n"
        "from q38.sglang_ext.early_process import Popen, Waiting\n"
        f"from {TARGET} import outlive\n"
        "waiting = Waiting('test', ())\n"
        "SpawnProcess._Popen = staticmethod(lambda process: Popen(process, waiting))\n"
        f"process = multiprocessing.get_context('spawn').Process(target=outlive, args=({str(file)!r},))\n"
        "process.start()\nprint(process.pid, flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))
    until(lambda: file.exists() and file.read_text() == "runs")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: gone(child))
    assert file.read_text() == "saw it"
