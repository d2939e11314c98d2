"""requant-int8: run again, run short of disk, killed at any point."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.base.progress import SILENT
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.quantize import requant_int8 as module
from q38.quantize.requant_int8 import requant_int8
from tests.quantize.requant.common import ATTENTION, BASE, digests, recipe, rewrite


def test_a_second_run_is_up_to_date(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_source: Path
) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in result[0].iterdir()}
    assert requant_int8(model, result[0], source=tiny_source, recipe=recipe()) == result[1]
    assert {p.name: p.stat().st_mtime_ns for p in result[0].iterdir()} == before


def test_dry_run_writes_nothing_and_knows_the_size(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    plan = requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), dry_run=True)
    assert not (tmp_path / "out").exists()
    assert plan["bytes"] == result[1]["bytes"] == Checkpoint.open(result[0]).nbytes
    assert [row["module"] for row in plan["matrices"]] == [row["module"] for row in result[1]["matrices"]]


def test_too_little_space_is_refused_before_the_first_byte(
    model: Path, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match="short"):
        requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / ".q38" / "int8").exists()


def test_a_full_disk_is_one_line_and_the_same_call_goes_on(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = os.pwrite, iter(range(10**9))

    def full(fd: int, data: Any, position: int) -> int:
        if next(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ResourceError, match="the disk is full"):
            requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), threads=1)
    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), threads=1)
    assert digests(tmp_path / "out") == digests(result[0])


def test_a_source_changed_between_two_runs_is_refused(
    model: Path, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_source, tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            requant_int8(model, tmp_path / "out", source=tmp_path / "source", recipe=recipe())
    rewrite(tmp_path / "source", f"{ATTENTION}.q_norm.weight", lambda w: w + 1)
    with pytest.raises(InputError, match="was begun with another source"):
        requant_int8(model, tmp_path / "out", source=tmp_path / "source", recipe=recipe())


def test_a_resumed_run_rounds_no_matrix_twice(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    monkeypatch.setattr(module, "round_matrix", lambda *_, **__: pytest.fail("rounded a second time"))
    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert digests(tmp_path / "out") == digests(result[0])


def test_a_shard_that_was_lost_after_its_scratch_went_is_made_again(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_metadata", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            requant_int8(model, out, source=tiny_source, recipe=recipe())
    (out / Checkpoint.open(model).info("lm_head.weight").file.name).unlink()
    rounded: list[str] = []
    real = module.round_matrix
    monkeypatch.setattr(
        module, "round_matrix", lambda job, m, **rest: rounded.append(m.module) or real(job, m, **rest)
    )
    requant_int8(model, out, source=tiny_source, recipe=recipe())
    assert rounded == ["lm_head"]
    assert digests(out) == digests(result[0])


def test_a_resumed_run_says_what_an_earlier_process_did(
    model: Path, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_metadata", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    seen: list[tuple[float | None, float]] = []

    class Watched:
        def task(self, label: str, total: float | None, unit: str = "B", done: float = 0) -> Any:
            seen.append((total, done))
            return SILENT.task(label, total, unit, done)

        def say(self, text: str) -> None: ...

    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), progress=Watched())
    assert len(seen) == 2 and all(total == done for total, done in seen)


@pytest.fixture
def command(model: Path, tiny_source: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(json.dumps(BASE))
    options = [
        "-o",
        str(tmp_path / "out"),
        "--source",
        str(tiny_source),
        "--recipe",
        str(tmp_path / "recipe.yaml"),
    ]
    return [sys.executable, "-m", "q38", "requant-int8", str(model), *options, "--json"]


def test_kill_at_any_point_and_the_same_command_ends_with_the_same_bytes(
    result: tuple[Path, dict[str, Any]], command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    points, killed = random.Random(0), 0
    for lines in (0, 3, 7, 9, 12):  # of the journal: 8 matrices, 5 shards, metadata
        process = subprocess.Popen(
            [*command, "--threads", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _wait_for_journal(out, lines, process)
        time.sleep(points.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 3
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["matrices"] == result[1]["matrices"]
    assert digests(out) == digests(result[0])


def _journal(out: Path) -> int:
    journal = out / ".q38" / "journal.jsonl"
    if (out / MANIFEST).exists():
        return 10**9
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0 if (out / ".q38" / "job.json").exists() else -1


def _wait_for_journal(out: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    while _journal(out) < lines and process.poll() is None:
        time.sleep(0.001)


def test_the_command_refuses_in_one_line_with_exit_code_2(command: list[str], tmp_path: Path) -> None:
    command[command.index("--source") + 1] = str(tmp_path / "absent")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["where"] == str(tmp_path / "absent")
    assert done.stderr.count("\n") == 1
