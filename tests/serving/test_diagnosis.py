"""The lines of a log that say what went wrong."""

from __future__ import annotations

import pytest

from q38.serving.diagnosis import describe_end, describe_exit, telling_lines

TRACEBACK = """INFO: loading
Traceback (most recent call last):
  File "x.py", line 1, in <module>
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB
"""


@pytest.mark.parametrize(
    ("log", "lines"),
    [
        (TRACEBACK, ["torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB"]),
        (TRACEBACK + "q38: port 1 is in use.\nbye\n", ["port 1 is in use."]),
        ("a\nld: cannot find -lcuda\nb\n", ["ld: cannot find -lcuda"]),
        ("one\ntwo\n\nthree\nfour\n", ["two", "three", "four"]),
        ("", []),
        ("a\n[..] [http_server] Error: The input is longer\n", ["a"]),
        ("a\nx.ConnectionError: Max retries exceeded with url: /freeze_gc (Caused by ...)\n", ["a"]),
        (
            "[..] q38: not finite: output of a\n[..] q38: not finite: output of b\n" + TRACEBACK,
            ["not finite: output of a"],
        ),
    ],
    ids=[
        "traceback",
        "ours",
        "sounds like trouble",
        "nothing",
        "empty",
        "a refused request",
        "no listener yet",
        "not finite",
    ],
)
def test_the_telling_lines_are_found(log: str, lines: list[str]) -> None:
    assert telling_lines(log) == lines


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "exit code 2"),
        (-9, "SIGKILL, as the kernel does"),
        (-11, "killed by SIGSEGV"),
        (-200, "signal 200"),
    ],
)
def test_an_exit_status_is_put_in_words(code: int, words: str) -> None:
    assert words in describe_exit(code)


def test_a_log_without_trouble_may_tell_nothing() -> None:
    assert telling_lines("one\ntwo\n", or_last=False) == []
    assert telling_lines("one\nerror: two\n", or_last=False) == ["error: two"]


CRASHED = "[..] Subprocess scheduler_0 (pid=7) crashed with exit code {}. Triggering SIGQUIT for cleanup...\nSIGQUIT received.\n"


@pytest.mark.parametrize(
    ("code", "log", "words", "counts"),
    [
        (-9, "", "killed by SIGKILL, as the kernel does", -9),
        (-9, CRASHED.format(-9), "scheduler_0: killed by SIGKILL, as the kernel does", -9),
        (-9, CRASHED.format(2), "scheduler_0: exit code 2", 2),
        (-9, "ValueError: x\nSIGQUIT received.\n", "it ended itself after a failure", 1),
        (-9, TRACEBACK + "SIGQUIT received.\n", "it ended itself after a failure", 3),
        (5, CRASHED.format(2), "exit code 5", 5),
    ],
)
def test_the_process_that_failed_first_is_named(code: int, log: str, words: str, counts: int) -> None:
    told, counted = describe_end(code, log)
    assert words in told
    assert counted == counts
