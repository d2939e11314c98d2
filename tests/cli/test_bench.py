"""q38 bench serve on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Result
from tests.serving.fake_server import FakeServer, answer, fake_server

Cli = Callable[..., Result]
SHORT = ("--contexts", "64,100", "--max-tokens", "3", "--repeats", "2")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        fake.script = lambda body: answer(["a", "b", "c"], body, first=0.002, between=0.001)
        yield fake


def test_the_result_goes_to_stdout_and_to_the_file(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    result = q38("bench", "serve", "--url", server.url, *SHORT, "-o", out, "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out) == json.loads(out.read_text())


def test_people_get_a_table(server: FakeServer, q38: Cli) -> None:
    out = q38("bench", "serve", "--url", server.url, *SHORT).out
    assert "prefill tok/s" in out
    assert [line.split()[0] for line in out.splitlines()[3:]] == ["64", "100"]


def test_a_failed_request_leaves_no_file(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    server.error = lambda body: (500, "boom") if len(server.requests) > 4 else None
    result = q38("bench", "serve", "--url", server.url, *SHORT, "-o", tmp_path / "b.json")
    assert result.code == 1
    assert "boom" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_sends_nothing(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    result = q38(
        "bench", "serve", "--url", server.url, *SHORT, "-o", tmp_path / "b.json", "--dry-run", "--json"
    )
    assert json.loads(result.out)["requests"] == 2 + 2 * 3
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("contexts", ["12k", "", "1,,2", "0"])
def test_contexts_that_are_no_numbers_are_refused(q38: Cli, contexts: str) -> None:
    result = q38("bench", "serve", "--contexts", contexts)
    assert result.code == 2
    assert "--contexts" in result.err


def test_without_a_server_it_is_exit_code_3(q38: Cli) -> None:
    with fake_server() as gone:
        url = gone.url
    assert q38("bench", "serve", "--url", url).code == 3
