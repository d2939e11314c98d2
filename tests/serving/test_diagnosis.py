"""The lines of a log that say what went wrong."""

from __future__ import annotations

import pytest

from q38.serving.diagnosis import describe_exit, telling_lines

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
    ],
    ids=["traceback", "ours", "sounds like trouble", "nothing", "empty"],
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
