"""A file that q38 did not write is never written over, whatever verb is told to."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from importlib import util
from pathlib import Path

import pytest

from q38.residency.synthetic import synthetic_trace
from q38.residency.trace import write_trace
from q38.synth.config import tiny_config
from tests.cli.conftest import Result
from tests.serving.fake_server import FakeServer, answer, fake_server

Cli = Callable[..., Result]
MINE = "my own words\n"
BENCH = ("bench", "serve", "--depths", "64", "--prefix", "cold", "--max-tokens", "2", "--repeats", "1", "--max-warmup", "1")  # fmt: skip


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        fake.script = lambda body: answer(["a", "b"], body, first=0.001, between=0.001)
        yield fake


@pytest.fixture
def traced(tmp_path: Path) -> tuple[Path, Path]:
    """The tiny model's config.json, and a trace of its shape."""
    config = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(config))
    text = config["text_config"]
    trace = synthetic_trace(
        40, layers=text["num_hidden_layers"], experts=text["num_experts"], top_k=2, seed=1
    )
    write_trace(tmp_path / "trace.safetensors", trace)
    return tmp_path / "config.json", tmp_path / "trace.safetensors"


def refused(result: Result, file: Path, content: str = MINE) -> None:
    assert result.code == 2, result.err
    assert str(file) in result.err
    assert "choose another file" in result.err.lower()
    assert file.read_text() == content


@pytest.mark.parametrize("option", ["-o", "--trace"])
@pytest.mark.parametrize("flag", ["--dry-run", "--fresh"])
def test_build_placement(q38: Cli, tiny_source: Path, tmp_path: Path, option: str, flag: str) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(MINE)
    out = () if option == "-o" else ("-o", tmp_path / "new.safetensors")
    refused(q38("build-placement", tiny_source, *out, option, mine, flag), mine)


@pytest.mark.parametrize("flag", ["--dry-run", "--fresh"])
def test_oracle_save(q38: Cli, tiny_source: Path, tmp_path: Path, flag: str) -> None:
    mine = tmp_path / "mine.txt"
    mine.write_text(MINE)
    refused(q38("oracle", "save", tiny_source, "-o", mine, flag), mine)


@pytest.mark.parametrize("name", ["figure.svg", "figure.png"])
def test_plan_draws_over_its_own_plot_alone(
    q38: Cli, traced: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    config, trace = traced
    figure = tmp_path / name
    for _ in range(2):
        result = q38("plan", config, "-r", "tiny", "--trace", trace, "--figure", figure)
        assert result.code == 0, result.err
    figure.write_text(MINE)
    result = q38("plan", config, "-r", "tiny", "--trace", trace, "--figure", figure)
    refused(result, figure)
    assert result.out == ""


def test_a_figure_of_no_known_kind_is_refused(q38: Cli, traced: tuple[Path, Path], tmp_path: Path) -> None:
    config, trace = traced
    result = q38("plan", config, "-r", "tiny", "--trace", trace, "--figure", tmp_path / "figure.docx")
    assert result.code == 2
    assert "neither PNG nor SVG" in result.err


def test_release_card(q38: Cli, tiny_packed: Path, tiny_ple: Path, tmp_path: Path) -> None:
    release, mine = tmp_path / "release", tmp_path / "README.md"
    assert q38("release", "build", tiny_packed, "--ple", tiny_ple, "-o", release).code == 0
    mine.write_text(MINE)
    refused(q38("release", "card", release, "-o", mine), mine)
    for _ in range(2):
        assert q38("release", "card", release, "-o", tmp_path / "card.md").code == 0


@pytest.mark.parametrize("flag", [(), ("--dry-run",)], ids=["write", "dry run"])
def test_export_patch(q38: Cli, tmp_path: Path, flag: tuple[str, ...]) -> None:
    if util.find_spec("sglang") is None:
        pytest.skip("no sglang: run scripts/test.sh, which installs SGLang")
    mine = tmp_path / "mine.diff"
    mine.write_text(MINE)
    refused(q38("patch-sglang", "export-patch", "-o", mine, *flag), mine)
    for _ in range(2):
        assert q38("patch-sglang", "export-patch", "-o", tmp_path / "q38.diff", *flag).code == 0


def test_bench_kernels_is_refused_before_it_asks_for_a_gpu(q38: Cli, tmp_path: Path) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(MINE)
    refused(q38("bench", "kernels", "-o", mine), mine)


@pytest.mark.parametrize("content", [MINE, '{"schema": "other/1"}', "[]"])
def test_bench_serve(q38: Cli, server: FakeServer, tmp_path: Path, content: str) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(content)
    for flag in ((), ("--fresh",), ("--dry-run",)):
        refused(q38(*BENCH, "--url", server.url, "-o", mine, *flag), mine, content)
    assert server.requests == []


def test_a_finished_benchmark_is_replaced_with_fresh_alone(
    q38: Cli, server: FakeServer, tmp_path: Path
) -> None:
    out = tmp_path / "before.json"
    out.touch()  # as mktemp leaves it
    assert q38(*BENCH, "--url", server.url, "-o", out).code == 0
    content = out.read_text()
    again = q38(*BENCH, "--url", server.url, "-o", out)
    refused(again, out, content)
    assert "--fresh" in again.err
    assert q38(*BENCH, "--url", server.url, "-o", out, "--fresh").code == 0
    assert out.read_text() != content
    out.write_text(content.replace('"complete": true', '"complete": false'))
    assert q38(*BENCH, "--url", server.url, "-o", out).code == 0


@pytest.mark.parametrize("flag", [(), ("--fresh",)], ids=["plain", "fresh"])
def test_oracle_kv(q38: Cli, tiny_source: Path, tmp_path: Path, flag: tuple[str, ...]) -> None:
    mine = tmp_path / "mine.json"
    mine.write_text(MINE)
    small = ("--tokens", 128, "--chunk", 64, "--needles", "none")
    refused(q38("oracle", "kv", tiny_source, "-o", mine, "--dry-run", *small, *flag), mine)
