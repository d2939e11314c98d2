"""q38 plan on the command line: q38 serve's defaults, and what a replay's options need."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from q38.data import data_path
from tests.cli.conftest import Result

Cli = Callable[..., Result]
RELEASE = data_path("assets", "models", "qwen3.8-flash-next.json")


def test_its_defaults_are_those_of_serve(q38: Cli) -> None:
    machine = json.loads(q38("plan", RELEASE, "--json").out)["machine"]
    assert machine["context"] == 262_144
    assert machine["kv_format"] == "int8ring_int4"
    assert machine["chunk"] == 4096
    assert machine["requests"] == 1
    spelled = q38("plan", RELEASE, "--kv", "auto", "--context", 262_144, "--sequences", 1, "--json")
    assert json.loads(spelled.out)["machine"] == machine


def test_people_read_both_ends_of_what_the_cache_leaves(q38: Cli) -> None:
    out = q38("plan", RELEASE, "--gpu", "23.9GiB").out
    assert "S = 213 of 512 experts per layer in VRAM, 186 once the whole context is in use" in out
    short = q38("plan", RELEASE, "--context", 32_768, "--kv", "fp8").out
    assert "once the whole context" not in short


def test_the_readme_tells_what_the_defaults_give(q38: Cli) -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    machine = json.loads(q38("plan", RELEASE, "--json").out)["machine"]
    assert (
        f"| {machine['resident_per_layer']} of 512 experts per layer on the GPU, {machine['resident_when_full']} once "
        f"the whole context is in use; {machine['host']['pinned expert rows'] / 1e9:.1f} GB pinned |"
    ) in readme


def test_a_machine_that_is_too_small_is_exit_code_3_after_the_sizes(q38: Cli) -> None:
    result = q38("plan", RELEASE, "--ram", "12GiB")
    assert result.code == 3
    assert "38,755,352,600 tensor bytes" in result.out
    assert "short" in result.err


@pytest.mark.parametrize("option", [("--link", "foo"), ("--resident", "5"), ("--figure", "f.svg")])
def test_an_option_of_the_replay_needs_a_trace(q38: Cli, option: tuple[str, str]) -> None:
    result = q38("plan", RELEASE, *option)
    assert result.code == 2
    assert f"{option[0]}: is for --trace. Give both, or neither." in result.err
    assert result.out == ""


def test_a_bad_trace_is_refused_before_the_plan_is_printed(q38: Cli, tmp_path: Path) -> None:
    trace = tmp_path / "trace.safetensors"
    trace.write_text("words")
    result = q38("plan", RELEASE, "--trace", trace)
    assert (result.code, result.out) == (2, "")
