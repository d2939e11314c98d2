"""q38 release as a shell sees it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Result

Cli = Callable[..., Result]
SHARD = "model-00001-of-00003.safetensors"


@pytest.fixture
def release(tiny_packed: Path, tiny_ple: Path, tmp_path: Path, q38: Cli) -> Path:
    """A release made by the command line."""
    out = tmp_path / "release"
    assert q38("release", "build", tiny_packed, "--ple", tiny_ple, "-o", out, "--copy").code == 0
    return out


def test_the_seal_that_build_prints_is_the_one_that_check_asks_for(
    tiny_packed: Path, tiny_ple: Path, tmp_path: Path, q38: Cli
) -> None:
    out = tmp_path / "release"
    built = q38("release", "build", tiny_packed, "--ple", tiny_ple, "-o", out)
    seal = built.out.strip().splitlines()[-1].removeprefix("seal: ")
    assert "no quality report" in built.out
    passed = q38("release", "check", out, "--full", "--digest", seal)
    assert (passed.code, passed.out.splitlines()[-1]) == (0, "release check: passed")
    other = q38("release", "check", out, "--digest", "0" * 64)
    assert other.code == 1
    assert "RELEASE.json  changed" in other.out


def test_a_failed_check_names_the_file_and_ends_with_1(release: Path, q38: Cli) -> None:
    (release / "config.json").write_text("{}")
    (release / "notes").write_text("")
    result = q38("release", "check", release)
    assert result.code == 1
    assert "config.json  changed" in result.out and "notes        extra" in result.out
    assert "release check: FAILED" in result.out
    document = json.loads(q38("release", "check", release, "--json").out)
    assert [fault["file"] for fault in document["faults"]] == ["config.json", "notes"]


def test_progress_tells_bytes_and_bytes_per_second(release: Path, q38: Cli) -> None:
    err = q38("release", "check", release, "--full").err
    assert re.search(r"check: .* [\d.]+ [KMG]iB/s in ", err)


def test_diff_ends_with_0_or_1_as_diff_does(
    release: Path, tiny_packed: Path, tiny_ple: Path, tmp_path: Path, q38: Cli
) -> None:
    again = tmp_path / "again"
    q38("release", "build", tiny_packed, "--ple", tiny_ple, "-o", again)
    same = q38("release", "diff", release, again)
    assert (same.code, same.out.splitlines()[-1]) == (0, "the same but for what may vary")
    assert q38("release", "diff", release, again, "--strict").code == 1
    assert q38("release", "diff", release, release, "--strict").code == 0
    data = bytearray((release / SHARD).read_bytes())
    data[-1] ^= 1
    (release / SHARD).write_bytes(data)
    different = q38("release", "diff", release, again)
    assert (different.code, different.out.splitlines()[-1]) == (1, "different")
    assert f"{SHARD}  changed  NO" in different.out
    assert json.loads(q38("release", "diff", release, again, "--json").out)["tensor_count"] == 1


def test_the_card_is_printed_or_written(release: Path, tmp_path: Path, q38: Cli) -> None:
    text = (release / "README.md").read_text()
    assert q38("release", "card", release).out == text
    assert q38("release", "card", release, "-o", tmp_path / "card.md").code == 0
    assert (tmp_path / "card.md").read_text() == text
    document = json.loads(q38("release", "card", release, "--json").out)
    assert document["metadata"]["library_name"] == "q38"


def test_a_broken_seal_is_one_line_and_exit_code_1(release: Path, q38: Cli) -> None:
    with (release / "RELEASE.json").open("a") as f:
        f.write("x")
    result = q38("release", "card", release)
    assert (result.code, len(result.err.splitlines())) == (1, 1)
    assert "RELEASE.json: was changed" in result.err


def test_what_a_run_has_is_not_taken_from_elsewhere(tmp_path: Path, q38: Cli) -> None:
    (tmp_path / "run.json").write_text("{}")
    result = q38("release", "build", tmp_path, "-o", tmp_path / "out", "--speed", tmp_path / "run.json")
    assert result.code == 2
    assert "--speed: the directory of a run has its own" in result.err
