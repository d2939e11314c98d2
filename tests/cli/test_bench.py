"""q38 bench serve on the command line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_gate_servers import proxy, steady_server
from tests.cli.conftest import Result
from tests.measure.test_bench_compare import RESULT, cell, noisy
from tests.serving.fake_server import FakeServer, answer, fake_server

Cli = Callable[..., Result]
SHORT = ("--depths", "64,100", "--prefix", "cold", "--max-tokens", "3", "--repeats", "2", "--max-warmup", "1")


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
    assert json.loads(result.out)["complete"] is True


def test_people_get_a_table(server: FakeServer, q38: Cli) -> None:
    out = q38("bench", "serve", "--url", server.url, *SHORT).out
    assert "prefill tok/s" in out
    assert [line.split()[0] for line in out.splitlines()[4:6]] == ["64", "100"]


def test_a_report_is_written_beside(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    result = q38("bench", "serve", "--url", server.url, *SHORT, "--report", tmp_path / "speed")
    assert result.code == 0, result.err
    names = {f.name for f in (tmp_path / "speed").iterdir()}
    assert {"report.html", "report.md", "decode.svg"} <= names


def test_a_failed_request_keeps_the_finished_cells_and_says_so(
    server: FakeServer, q38: Cli, tmp_path: Path
) -> None:
    # Calibration, the first depth, then the second one's first request.
    server.error = lambda body: (500, "boom") if len(server.requests) > 2 + 3 else None
    out, report = tmp_path / "b.json", tmp_path / "report"
    result = q38("bench", "serve", "--url", server.url, *SHORT, "-o", out, "--report", report)
    assert result.code == 1
    assert "depth 100, cold prefix, warm-up 1: HTTP 500: boom; 1 cell finished before it" in result.err
    document = json.loads(out.read_text())
    assert document["complete"] is False
    assert [c["depth"] for c in document["cells"]] == [64]
    assert "INCOMPLETE" in result.out
    assert "INCOMPLETE" in (report / "report.md").read_text()
    refused = q38("bench", "serve", "--url", server.url, *SHORT, "--against", out)
    assert refused.code == 2
    assert "did not end" in refused.err


def test_a_failure_with_json_is_one_document_with_what_was_measured(server: FakeServer, q38: Cli) -> None:
    server.error = lambda body: (500, "boom") if len(server.requests) > 2 + 3 else None
    document = json.loads(q38("bench", "serve", "--url", server.url, *SHORT, "--json").out)
    assert document["error"]["exit_code"] == 1
    assert [c["depth"] for c in document["partial"]["cells"]] == [64]


def test_nothing_measured_leaves_no_file(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    server.error = lambda body: (500, "boom")
    result = q38("bench", "serve", "--url", server.url, *SHORT, "-o", tmp_path / "b.json")
    assert result.code == 1
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_sends_nothing(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    result = q38(
        "bench", "serve", "--url", server.url, *SHORT, "-o", tmp_path / "b.json", "--dry-run", "--json"
    )
    assert json.loads(result.out)["most_rounds"] == 2 * 3
    assert server.requests == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--depths", "12m"), "--depths"),
        (("--depths", "0"), "--depths"),
        (("--concurrency", "1,x"), "--concurrency"),
        (("--prefix", "hot"), "--prefix"),
        (("--repeats", "0"), "--repeats"),
        (("--repeats", "1", "--against", "http://127.0.0.1:1"), "--repeats"),
        (("--gate", "0"), "--gate"),
        (("--against", "nowhere.json"), "nowhere.json"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_options_that_measure_nothing_are_refused(q38: Cli, options: tuple[str, ...], named: str) -> None:
    result = q38("bench", "serve", *options)
    assert result.code == 2
    assert named in result.err


def test_an_unwritable_result_is_refused_early(server: FakeServer, q38: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option in ("-o", "--report"):
        result = q38("bench", "serve", "--url", server.url, *SHORT, option, tmp_path / "file" / "out")
        assert result.code == 2
    assert server.requests == []


def test_without_a_server_it_is_exit_code_3(q38: Cli) -> None:
    with fake_server() as gone:
        url = gone.url
    assert q38("bench", "serve", "--url", url).code == 3


def test_a_stored_run_decides_the_exit_code(q38: Cli, tmp_path: Path) -> None:
    # 20 ms a token, and 30 % more: far above what a busy machine does to its timer.
    options = ("--depths", "100", "--prefix", "cold", "--max-tokens", "8", "--repeats", "10")
    base = tmp_path / "base.json"
    compare = (*options, "--against", base, "--gate", "0.9")
    with steady_server(0.05, 0.02) as server, proxy(server, stretch=1.3) as slow:
        assert q38("bench", "serve", "--url", server, *options, "-o", base).code == 0
        assert q38("bench", "serve", "--url", server, *compare).code == 0
        slower = q38("bench", "serve", "--url", slow, *compare, "--json")
        other = q38("bench", "serve", "--url", server, *compare, "--seed", "1")
    assert slower.code == 1
    assert "slower than the gate of 0.9" in slower.err
    assert json.loads(slower.out)["comparison"]["verdict"] == "slower"
    assert other.code == 2
    assert "seed: 1, was 0" in other.err


def test_two_stored_runs_are_compared(q38: Cli, tmp_path: Path) -> None:
    def store(name: str, result: dict[str, Any]) -> Path:
        (tmp_path / name).write_text(json.dumps(result))
        return tmp_path / name

    base = {**RESULT, "when": "2026-11-30T10:00:00+00:00", "cells": [cell(noisy(1, 1, sigma=0.002))]}
    old = store("old.json", base)
    same = q38("bench", "compare", store("same.json", base), old)
    assert same.code == 0, same.err
    assert "not slower: every interval lies at or above 0.98" in same.out
    slower = {**base, "cells": [cell([f / 0.9 for f in noisy(1, 1, sigma=0.002)])]}
    slow = q38("bench", "compare", store("slow.json", slower), old, "--json")
    assert slow.code == 1
    assert "slower than the gate of 0.98" in slow.err
    assert "decode at depth 128, cold prefix 0.900" in slow.err
    assert json.loads(slow.out)["verdict"] == "slower"
    shorter = store("shorter.json", {**base, "settings": {**base["settings"], "max_tokens": 8}})
    refused = q38("bench", "compare", shorter, old)
    assert refused.code == 2
    assert f"{old}: not the same measurement (max_tokens: 8, was 64)" in refused.err
    allowed = q38("bench", "compare", shorter, old, "--allow-different")
    assert allowed.code == 0
    assert "Compared although different: max_tokens: 8, was 64." in allowed.out
