"""What every verb keeps: help, JSON, exit codes, refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.commands import COMMANDS, ROOT, options
from tests.cli.conftest import Result

Cli = Callable[..., Result]
VERBS = [
    "run", "doctor", "synth", "inspect", "plan", "split-ple", "quantize", "requant-int8", "tune-triton", "build-placement",
    "patch-sglang", "serve", "verify", "bench", "oracle", "release",
]  # fmt: skip


def is_one_refusal(result: Result) -> bool:
    return (
        len(result.err.strip().splitlines()) == 1
        and result.err.startswith("q38")
        and "Traceback" not in result.err
    )


def test_all_verbs_are_there_in_the_order_of_the_pipeline() -> None:
    assert ROOT.list_commands(None) == VERBS
    assert set(ROOT.commands) == set(VERBS)


@pytest.mark.parametrize("path", COMMANDS)
def test_help_is_printed_and_ends_well(path: str, q38: Cli) -> None:
    result = q38(*path.split(), "--help")
    assert result.code == 0
    assert f"Usage: q38 {path}" in result.out


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_and_argument_has_a_sentence(path: str) -> None:
    for parameter in COMMANDS[path].params:
        text = (parameter.help or "").strip()
        assert text.endswith((".", "?")), f"{parameter.name}: {text!r}"
    assert (COMMANDS[path].help or "").strip().endswith(".")


@pytest.mark.parametrize("path", COMMANDS)
def test_every_command_has_json_and_debug(path: str) -> None:
    assert options(path) >= {"--json", "--debug"}


@pytest.mark.parametrize(
    "path",
    [
        "synth tiny",
        "split-ple",
        "quantize",
        "requant-int8",
        "build-placement",
        "oracle save",
        "release build",
        "run",
    ],
)
def test_a_command_that_makes_a_result_has_a_dry_run_and_can_start_over(path: str) -> None:
    assert options(path) >= {"--dry-run", "--fresh"}


@pytest.mark.parametrize("path", COMMANDS)
def test_an_unknown_option_is_one_line_and_exit_code_2(path: str, q38: Cli) -> None:
    result = q38(*path.split(), "--no-such-option")
    assert result.code == 2
    assert is_one_refusal(result)
    assert "--no-such-option" in result.err


@pytest.mark.parametrize("path", COMMANDS)
def test_a_usage_error_is_json_with_json(path: str, q38: Cli) -> None:
    result = q38(*path.split(), "--no-such-option", "--json")
    assert json.loads(result.out)["error"]["exit_code"] == 2


def test_an_unknown_verb_is_one_line_and_exit_code_2(q38: Cli) -> None:
    result = q38("quantise")
    assert result.code == 2
    assert is_one_refusal(result)


def test_the_program_alone_prints_its_help(q38: Cli) -> None:
    result = q38()
    assert result.code == 2
    assert "Usage: q38" in result.err


def test_the_version_is_printed(q38: Cli) -> None:
    import q38 as package

    assert q38("--version").out.strip() == package.__version__


def missing(tmp: Path) -> dict[str, list[object]]:
    """Command -> arguments that name a directory which is not there."""
    no, out = tmp / "absent", tmp / "out"
    return {
        "inspect": [no],
        "plan": [no],
        "split-ple": [no, "-o", out],
        "quantize": [no, "-o", out, "--recipe", "tiny"],
        "requant-int8": [no, "-o", out, "--source", no, "--recipe", "tiny"],
        "build-placement": [no, "-o", out / "p.safetensors"],
        "verify": [no],
        "oracle save": [no, "-o", out / "o.json"],
        "oracle check": [no, no / "o.json"],
        "release build": [no, "-o", out],
        "release check": [no],
        "release diff": [no, no],
        "release card": [no],
        "serve": [no],
        "run": ["tiny", "--workdir", out, "--source", no],
    }


@pytest.mark.parametrize("path", missing(Path()))
@pytest.mark.parametrize("flag", [[], ["--json"]], ids=["text", "json"])
def test_a_missing_directory_is_named_in_one_line(
    path: str, flag: list[str], tmp_path: Path, q38: Cli
) -> None:
    result = q38(*path.split(), *missing(tmp_path)[path], *flag)
    assert result.code == 2, result.err
    assert is_one_refusal(result), result.err
    assert "absent" in result.err
    assert not list(tmp_path.iterdir()), "a refused command left something behind"
    if flag:
        error = json.loads(result.out)["error"]
        assert (error["kind"], error["exit_code"]) == ("InputError", 2)
        assert error["remedy"]
    else:
        assert result.out == ""


@pytest.mark.parametrize("path", ["run", "plan", "quantize", "requant-int8"])
def test_an_unknown_recipe_key_is_named_with_the_nearest_one(
    path: str, tmp_path: Path, tiny_source: Path, q38: Cli
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("schema: q38.recipe/1\nname: t\nquantize: {group_sise: 64}\n")
    out = tmp_path / "out"
    arguments = {
        "run": [recipe, "--workdir", out, "--source", tiny_source],
        "plan": [tiny_source, "--recipe", recipe],
        "quantize": [tiny_source, "-o", out, "--recipe", recipe],
        "requant-int8": [tiny_source, "-o", out, "--source", tiny_source, "--recipe", recipe],
    }
    result = q38(path, *arguments[path])
    assert result.code == 2
    assert is_one_refusal(result), result.err
    assert "quantize.group_sise" in result.err
    assert "group_size" in result.err
    assert not out.exists()


def test_a_fault_of_ours_is_one_line_without_debug(q38: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from q38.pipeline import run as pipeline

    def broken(*args: object, **options: object) -> None:
        raise KeyError("layers\nof lines")

    monkeypatch.setattr(pipeline, "dry_run", broken)
    result = q38("run", "tiny", "--workdir", "w", "--dry-run")
    assert result.code == 1
    assert is_one_refusal(result)
    assert "internal error" in result.err
    assert "Traceback" in q38("run", "tiny", "--workdir", "w", "--dry-run", "--debug").err


def test_a_fault_of_ours_is_json_with_json(q38: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from q38.pipeline import run as pipeline

    def broken(*args: object, **options: object) -> None:
        raise KeyError("layers")

    monkeypatch.setattr(pipeline, "dry_run", broken)
    result = q38("run", "tiny", "--workdir", "w", "--dry-run", "--json")
    assert json.loads(result.out)["error"]["kind"] == "InternalError"
