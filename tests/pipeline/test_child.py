"""A step as a child process."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from q38.pipeline import child
from q38.pipeline.child import MemorySampler, Outcome, StepFailed, command_line, parse_document


def test_a_command_line_can_be_pasted_into_a_shell() -> None:
    assert command_line(["inspect", "a dir"]) == "python -m q38 inspect 'a dir' --json"


def test_a_refused_step_gives_its_document_and_exit_code() -> None:
    outcome = child.run(["run", "no-such-recipe", "--workdir", "/nowhere"])
    assert outcome.exit_code == 2
    assert outcome.document is not None
    assert outcome.document["error"]["what"] == "no such recipe"
    assert outcome.peak_memory > 2**20


@pytest.mark.parametrize(
    ("text", "expected"), [('{"a": 1}\n', {"a": 1}), ("[1]", None), ("", None), ("Traceback", None)]
)
def test_only_a_json_object_is_a_document(text: str, expected: object) -> None:
    assert parse_document(text) == expected


@pytest.mark.parametrize(
    ("code", "document", "exit_code", "words"),
    [
        (
            2,
            {"error": {"what": "the disk", "where": "f", "remedy": "buy one"}},
            2,
            "refused: the disk (f). Buy one.",
        ),
        (1, {"passed": False}, 1, "says no"),
        (1, None, 1, "no result"),
        (-9, None, 3, "want of memory"),
        (-11, None, 1, "signal 11"),
        (0, None, 1, "exit code 0 and no result"),
    ],
)
def test_a_failed_step_says_what_happened(
    code: int, document: dict[str, object] | None, exit_code: int, words: str
) -> None:
    error = StepFailed("quantize", Outcome(code, document, 1.0, 0))
    assert error.exit_code == exit_code
    assert words in str(error)
    assert "step quantize" in str(error)


def test_the_memory_of_grandchildren_counts() -> None:
    block = "x = b'x' * (80 * 2**20); print(1, flush=True); input()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {block!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        memory = MemorySampler(process.pid)
        deadline = time.monotonic() + 30
        while memory.peak < 80 * 2**20 and time.monotonic() < deadline:
            time.sleep(0.05)
        process.communicate(b"\n")
        assert memory.stop() > 80 * 2**20


def test_a_process_that_ends_while_it_is_measured_counts_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    tree = child.process_tree(process.pid)
    process.communicate(b"\n")
    assert len(tree) == 1
    assert child.resident_memory(tree) == 0
    assert child.process_tree(process.pid) == []
