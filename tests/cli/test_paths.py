"""A path of the wrong kind: the line says what it is, and what to give instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

Cli = Callable[..., Result]


def line(result: Result) -> str:
    assert result.code == 2, result.err
    assert "ownload" not in result.err
    return result.err


@pytest.mark.parametrize(
    "verb", [("serve",), ("inspect",), ("verify",), ("release", "check"), ("release", "build", "-o", "out")]
)
def test_a_file_in_place_of_its_directory(q38: Cli, tiny_source: Path, verb: tuple[str, ...]) -> None:
    config = tiny_source / "config.json"
    assert f"{config}: is a file. Give its directory, {tiny_source}." in line(q38(*verb, config))


@pytest.mark.parametrize("content", [None, "{", "{}", "[]"], ids=["absent", "broken", "other", "list"])
def test_what_is_no_oracle_reference(
    q38: Cli, tiny_source: Path, tmp_path: Path, content: str | None
) -> None:
    file = tmp_path / "ref.json"
    if content is not None:
        file.write_text(content)
    assert "Give a file that q38 oracle save wrote." in line(q38("oracle", "check", tiny_source, file))


@pytest.mark.parametrize("content", [None, "words"], ids=["absent", "other"])
def test_what_is_no_trace(q38: Cli, tiny_source: Path, tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "trace.safetensors"
    if content is not None:
        file.write_text(content)
    result = q38("plan", tiny_source, "-r", "tiny", "--trace", file)
    assert "Record a trace with q38 build-placement." in line(result)


def test_a_json_file_that_is_no_config_is_called_by_its_name(
    q38: Cli, tiny_source: Path, tmp_path: Path
) -> None:
    tokenizer = tiny_source / "tokenizer.json"
    said = line(q38("plan", tokenizer, "-r", "tiny"))
    assert said.startswith(f"q38: {tokenizer}: is no config.json of a model: it has no model_type.")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert "model_type is 'llama', not qwen4_exp" in line(q38("inspect", tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert f"{tmp_path / 'config.json'}: is no config.json of a model" in line(q38("inspect", tmp_path))
