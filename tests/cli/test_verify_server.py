"""q38 verify --server on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.conftest import Result
from tests.measure.faulty_proxy import Change, faulty_proxy

if TYPE_CHECKING:
    from q38.serving.launch import Server

Cli = Callable[..., Result]


def test_people_get_a_table_and_a_verdict(tiny_server: Server, q38: Cli) -> None:
    result = q38("verify", "--server", tiny_server.url, "--only", "one-token,finite-logprobs")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert lines[0].startswith(f"tiny at {tiny_server.url}")
    assert any(line.split()[:2] == ["one-token", "passed"] for line in lines)
    assert any(line.split()[:2] == ["finite-logprobs", "-"] and "not supported" in line for line in lines)
    assert lines[-1] == "verify: passed (1 rows without a verdict)"


def test_a_failed_row_ends_with_1(tiny_server: Server, q38: Cli) -> None:
    with faulty_proxy(tiny_server.url) as proxy:
        proxy.fault = lambda path, body: Change(lambda line: line.replace('"usage"', '"used"'))
        result = q38("verify", "--server", proxy.url, "--only", "one-token")
    assert result.code == 1
    assert "the server sends no token counts (usage)" in result.out
    assert "verify: FAILED (1 rows failed, 0 without a verdict)" in result.out


def test_json_is_one_document(tiny_server: Server, q38: Cli) -> None:
    result = q38("verify", "--server", tiny_server.url, "--only", "one-token", "--json")
    document = json.loads(result.out)
    assert (document["schema"], document["passed"]) == ("q38.verify-server/1", True)
    assert result.err == "" or "one-token" not in result.out.splitlines()[0][:20]


def test_a_directory_is_served_meanwhile(tiny_quantized: Path, tiny_ple: Path, q38: Cli) -> None:
    from q38.serving import records

    before = records.running()
    result = q38(
        "verify", "--server", tiny_quantized, "--ple", tiny_ple, "--engine", "transformers", "--only", "one-token"
    )  # fmt: skip
    assert result.code == 0, result.err
    assert "one-token" in result.out
    assert records.running() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to check"),
        (["model", "--server", "http://127.0.0.1:1"], "is for a checkpoint"),
        (["--server", "http://127.0.0.1:1", "--max-kl", "1"], "is for a checkpoint"),
        (["--server", "absent"], "no such directory"),
        (["--server", "http://127.0.0.1:1", "--needles", "2x"], "no number of tokens"),
        (["--server", "http://127.0.0.1:1", "--depths", "deep"], "no share"),
        (["--server", "http://127.0.0.1:1", "--only", "speed"], "unknown check"),
    ],
)
def test_contradicting_options_are_one_line_and_exit_code_2(
    arguments: list[str], words: str, q38: Cli
) -> None:
    result = q38("verify", *arguments)
    assert result.code == 2
    assert words in result.err and result.err.count("\n") == 1


def test_no_server_is_exit_code_3(tiny_server: Server, q38: Cli) -> None:
    with faulty_proxy(tiny_server.url) as gone:
        url = gone.url
    result = q38("verify", "--server", url)
    assert result.code == 3
    assert "no server answers" in result.err
