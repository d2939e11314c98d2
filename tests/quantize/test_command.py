"""`q38 quantize` as people call it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from q38.cli.app import main
from tests.quantize.conftest import FAST

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["q38", "quantize", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def test_a_dry_run_names_bits_and_bytes_and_writes_nothing(
    call: Call, tiny_source: Path, tmp_path: Path
) -> None:
    code, out, _ = call(tiny_source, "-o", tmp_path / "out", "-r", FAST, "--dry-run")
    assert code == 0
    assert "192 x 2 bit" in out
    assert "would read" in out and "714 tensors" in out
    assert "512 tokens" in out
    assert list(tmp_path.iterdir()) == []


def test_json_is_one_document_that_parses(
    call: Call, tiny_source: Path, tiny_ple: Path, tiny_quantized: Path
) -> None:
    code, out, _ = call(tiny_source, "-o", tiny_quantized, "-r", FAST, "--ple", tiny_ple, "--json")
    assert code == 0
    document = json.loads(out)
    assert document["complete"]
    assert document["bits"]["experts"] == {"2": 192}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--blocks", "2-3"], "--blocks: starts at block 2"),
        (["-r", "absent.yaml"], "absent.yaml: no such recipe"),
    ],
)
def test_bad_usage_is_one_line_and_exit_2(
    options: list[str], message: str, call: Call, tiny_source: Path, tmp_path: Path
) -> None:
    code, _, err = call(tiny_source, "-o", tmp_path / "out", "-r", FAST, *options)
    assert code == 2
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_a_directory_with_other_files_is_refused(
    call: Call, tiny_source: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    code, _, err = call(tiny_source, "-o", tmp_path, "-r", FAST, "--ple", tiny_ple)
    assert code == 2
    assert "holds files that q38 did not write" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
