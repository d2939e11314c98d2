"""The JSON document of every verb, and dry runs that write nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

Cli = Callable[..., Result]
FAST = Path(__file__).parents[1] / "data" / "fast.yaml"


def _tree(*roots: Path) -> dict[Path, tuple[int, int]]:
    """Every file and directory below the roots, with size and time of change."""
    return {p: (p.stat().st_size, p.stat().st_mtime_ns) for root in roots for p in root.rglob("*")}


DRY = [
    "synth tiny", "synth sparse", "split-ple", "quantize", "requant-int8", "build-placement", "oracle save", "run", "serve", "bench serve",
    "tune-triton", "release build", "synth full", "oracle kv", "serve fleet",
]  # fmt: skip


@pytest.mark.parametrize("path", DRY)
def test_a_dry_run_writes_nothing_and_its_json_parses(
    path: str,
    q38: Cli,
    tmp_path: Path,
    tiny_source: Path,
    tiny_ple: Path,
    tiny_quantized: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    arguments: dict[str, list[object]] = {
        "synth tiny": [out],
        "synth sparse": [out],
        "split-ple": [tiny_source, "-o", out],
        "quantize": [tiny_source, "-o", out, "--recipe", FAST, "--ple", tiny_ple],
        "requant-int8": [tiny_quantized, "-o", out, "--source", tiny_source, "--recipe", FAST],
        "build-placement": [tiny_quantized, "-o", out, "--ple", tiny_ple],
        "oracle save": [tiny_quantized, "-o", out, "--ple", tiny_ple],
        "run": [FAST, "--workdir", out, "--source", tiny_source],
        "serve": [tiny_quantized, "--ple", tiny_ple, "--port", "0"],
        "serve fleet": ["--server", "http://127.0.0.1:9", "--port", "0"],
        "bench serve": ["--contexts", "32", "-o", out],
        "tune-triton": [tiny_source, "-o", out],
        "synth full": [out],
        "oracle kv": [tiny_quantized, "-o", out / "kv.json", "--ple", tiny_ple, "--device", "cpu"],
        "release build": [tiny_quantized, "--ple", tiny_ple, "-o", out],
    }
    monkeypatch.chdir(tmp_path)
    before = _tree(tmp_path, tiny_source, tiny_ple, tiny_quantized)
    result = q38(*path.split(), *arguments[path], "--dry-run", "--json")
    assert _tree(tmp_path, tiny_source, tiny_ple, tiny_quantized) == before
    assert result.code in (0, 3), result.err  # 3: a machine without a GPU may say so at once
    assert isinstance(json.loads(result.out), dict)


def test_every_command_with_a_dry_run_is_tried_here() -> None:
    from tests.cli.commands import COMMANDS, options

    offered = {path for path in COMMANDS if "--dry-run" in options(path)}
    shell = {path for path in offered if path.startswith("patch-sglang ")}  # test_patch_sglang.py
    assert offered - shell == {"serve start" if path == "serve" else path for path in DRY}


@pytest.mark.parametrize(
    "path", ["inspect", "plan", "verify", "doctor", "serve status", "split-ple --verify"]
)
def test_the_json_of_a_reading_verb_is_one_document(
    path: str, q38: Cli, tiny_source: Path, tiny_ple: Path, tiny_quantized: Path
) -> None:
    arguments: dict[str, list[object]] = {
        "inspect": [tiny_quantized],
        "plan": [tiny_source, "--recipe", FAST],
        "verify": [tiny_quantized, "--ple", tiny_ple, "--parts", "structure"],
        "split-ple --verify": [tiny_ple, "--against", tiny_source],
    }
    result = q38(*path.split(), *arguments.get(path, []), "--json")
    assert result.code == 0, result.err
    assert isinstance(json.loads(result.out), dict)


@pytest.mark.parametrize("path", ["tune-triton", "bench kernels"])
def test_a_verb_that_lacks_something_says_what_and_ends_with_3(
    path: str, q38: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA GPU")
    monkeypatch.chdir(tmp_path)
    result = q38(*path.split(), "--json")
    assert result.code == 3
    error = json.loads(result.out)["error"]
    assert (error["kind"], error["exit_code"]) == ("ResourceError", 3)
    assert error["remedy"]
    assert list(tmp_path.iterdir()) == []
