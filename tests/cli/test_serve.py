"""q38 serve on the command line: sub-verbs, refusals, dry run."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from q38.serving import engines
from tests.cli.conftest import Result

Cli = Callable[..., Result]


def test_start_may_be_left_out(q38: Cli, tmp_path: Path) -> None:
    short, full = q38("serve", tmp_path), q38("serve", "start", tmp_path)
    assert short.err == full.err
    assert short.code == full.code == 2


def test_its_help_shows_the_options_and_the_sub_verbs(q38: Cli) -> None:
    out = q38("serve", "--help").out
    for word in ("--engine", "--port", "q38 serve status", "q38 serve stop"):
        assert word in out


def test_a_port_in_use_is_refused_before_anything_starts(q38: Cli, tiny_source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        result = q38("serve", tiny_source, "--port", sock.getsockname()[1], "--log", log)
    assert result.code == 3
    assert "in use" in result.err
    assert not log.exists()


def test_listening_to_others_needs_a_key(
    q38: Cli, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("Q38_API_KEY", raising=False)
    result = q38("serve", tiny_source, "--host", "0.0.0.0", "--port", 0)
    assert result.code == 2
    assert "Q38_API_KEY" in result.err


def test_the_sglang_engine_says_what_it_lacks(q38: Cli, tiny_source: Path) -> None:
    result = q38("serve", tiny_source, "--port", 0, "--engine", "sglang", "--json")
    assert result.code == 3
    assert "no CUDA GPU" in json.loads(result.out)["error"]["what"]


def test_auto_says_why_it_takes_no_sglang(
    q38: Cli, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines.sglang_engine, "has_cuda_gpu", lambda: False)
    document = json.loads(q38("serve", tiny_source, "--port", 0, "--dry-run", "--json").out)
    assert document["engine"] == "transformers"
    assert document["passed_over"].startswith("engine sglang cannot run here: no CUDA GPU")
    result = q38("serve", tiny_source, "--port", 0, "--gpu-memory", "23GiB", "--dry-run")
    assert result.code == 3
    assert "--gpu-memory: needs engine sglang" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine", "transformers", "--context", "512"], "no --context"),
        (["--engine", "sglang", "--device", "tpu"], "unknown device"),
        (["--engine", "sglang", "--device", "cpu", "--gpu-memory", "8GiB"], "--gpu-memory"),
        (["--engine", "sglang", "--device", "cpu", "--ram", "lots"], "--ram"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    q38: Cli,
    tiny_packed: Path,
    tiny_ple: Path,
    arguments: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines.sglang_engine, "lacks", lambda: [])
    monkeypatch.setattr(engines.sglang_engine, "lacks_on_cpu", lambda: [])
    result = q38("serve", tiny_packed, "--ple", tiny_ple, "--port", 0, *arguments, "--dry-run")
    assert result.code == 2
    assert said in result.err


def test_the_plan_is_part_of_a_dry_run(
    q38: Cli, tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines.sglang_engine, "lacks_on_cpu", lambda: [])
    options = ["--port", 0, "--engine", "sglang", "--device", "cpu", "--dry-run", "--json"]
    document = json.loads(q38("serve", tiny_packed, "--ple", tiny_ple, *options).out)
    assert document["plan"]["host"]["expert rows"] > 0
    assert "--disable-overlap-schedule" not in document["command"]
    document = json.loads(q38("serve", tiny_packed, "--ple", tiny_ple, "--no-overlap", *options).out)
    assert "--disable-overlap-schedule" in document["command"]


def test_a_dry_run_starts_nothing_and_shows_the_command(q38: Cli, tiny_source: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    document = json.loads(
        q38(
            "serve", tiny_source, "--port", 0, "--engine", "transformers", "--log", log, "--dry-run", "--json"
        ).out
    )
    assert document["engine"] == "transformers"
    assert str(tiny_source) in document["command"]
    assert not log.exists()


def test_status_without_servers_is_no_error(
    q38: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Q38_STATE_DIR", str(tmp_path))
    assert "no q38 server runs" in q38("serve", "status").out
    assert json.loads(q38("serve", "status", "--json").out) == {"servers": []}


def test_stop_without_servers_is_a_missing_resource(
    q38: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Q38_STATE_DIR", str(tmp_path))
    result = q38("serve", "stop", "--port", 4)
    assert result.code == 3
    assert "port 4" in result.err


@pytest.mark.parametrize("verb", ["status", "stop"])
@pytest.mark.parametrize("port", [-4, 0, 65536])
def test_no_port_is_refused_as_by_start(q38: Cli, verb: str, port: int) -> None:
    result = q38("serve", verb, "--port", port)
    assert result.code == 2
    assert f"--port: {port} is not a port. Use 1 to 65535." in result.err
