"""The whole run on the tiny model, killed and resumed."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.pipeline.releasing import from_run
from q38.pipeline.run import dry_run, run
from q38.release.build import build
from q38.release.check import check
from tests.measure.pages import check_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a loaded machine is slow, not wrong
DATA = Path(__file__).parents[1] / "data"
STEPS = [
    "inspect", "split-ple", "quantize", "requant-int8", "build-placement", "verify", "oracle-save", "serve", "bench", "oracle-check",
]  # fmt: skip


def _command(recipe: Path, workdir: Path, source: Path, *options: str) -> list[str]:
    paths = [str(recipe), "--workdir", str(workdir), "--source", str(source)]
    return [sys.executable, "-m", "q38", "run", *paths, *options]


def _call(recipe: Path, workdir: Path, source: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = _command(recipe, workdir, source, *options)
    return subprocess.run(command, capture_output=True, text=True, timeout=1500)


def _tensor_files(directory: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in sorted(directory.rglob("*")) if p.suffix in (".safetensors", ".bin")
    }


def _processes_about(workdir: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if process.info["status"] != psutil.STATUS_ZOMBIE and any(str(workdir) in word for word in words):
            found.append(process)
    return found


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fast recipe, with two short prompts for the oracle."""
    file = tmp_path_factory.mktemp("recipe") / "fast.yaml"
    oracle = {"prompts": str(DATA / "oracle.json")}
    file.write_text((DATA / "fast.yaml").read_text() + f"oracle: {json.dumps(oracle)}\n")
    return file


def _changed(recipe: Path, directory: Path, old: str, new: str) -> Path:
    """A copy of the recipe with another value."""
    text = recipe.read_text()
    assert old in text
    file = directory / "changed.yaml"
    file.write_text(text.replace(old, new))
    return file


@pytest.fixture(scope="module")
def source(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tiny model: a test of this module edits it."""
    return Path(shutil.copytree(tiny_source, tmp_path_factory.mktemp("run_source") / "source"))


@pytest.fixture(scope="module")
def finished(recipe: Path, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    work = tmp_path_factory.mktemp("run") / "work"
    done = _call(recipe, work, source, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["ran"] == STEPS
    return work


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished run, to change."""
    return Path(shutil.copytree(finished, tmp_path / "moved"))


def test_a_run_ends_with_an_answer_a_table_and_a_report(finished: Path) -> None:
    report = read_json(finished / "report.json")
    assert report["passed"]
    assert [s["step"] for s in report["steps"]] == STEPS
    assert all(s["seconds"] > 0 and s["peak_memory"] > 2**20 for s in report["steps"])
    assert report["serve"]["chat"]["question"] == "Hello! Who are you?"
    assert report["serve"]["chat"]["completion_tokens"] > 0
    assert report["bench"]["complete"]
    check_page((finished / "report.html").read_text())


def test_the_second_run_does_nothing_and_says_the_same(finished: Path, recipe: Path, source: Path) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*") if p.is_file() and p.name != "run.json"}
    first = read_json(finished / "report.json")
    document = run(recipe, finished, source=source)
    assert document["ran"] == []
    assert document["chat"] == first["serve"]["chat"]
    assert [s["seconds"] for s in document["steps"]] == [s["seconds"] for s in first["steps"]]
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_a_moved_run_is_still_done(copy: Path, recipe: Path, source: Path) -> None:
    assert run(recipe, copy, source=source)["ran"] == []


def test_a_changed_recipe_is_refused_with_the_key(
    copy: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    done = _call(_changed(recipe, tmp_path, "iters: 2", "iters: 3"), copy, source)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "quantize.experts.iters (2, now 3)" in done.stderr
    assert "--fresh-from quantize" in done.stderr


def test_starting_over_later_than_the_change_is_refused(
    copy: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="step quantize uses"):
        run(_changed(recipe, tmp_path, "iters: 2", "iters: 3"), copy, source=source, fresh_from="bench")
    assert run(recipe, copy, source=source)["ran"] == []


def test_a_changed_source_is_refused_and_nothing_is_dropped(
    copy: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    changed = Path(shutil.copytree(source, tmp_path / "changed"))
    shard = changed / "model-00003-of-00010.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    for options in ({}, {"fresh_from": "quantize"}):
        with pytest.raises(InputError, match=r"the source changed.*model-00003-of-00010"):
            run(recipe, copy, source=changed, **options)  # type: ignore[arg-type]
    assert run(recipe, copy, source=source)["ran"] == []


def test_a_changed_output_is_refused_with_the_step_to_redo(copy: Path, recipe: Path, source: Path) -> None:
    table = next((copy / "ple").glob("*.bin"))
    data = bytearray(table.read_bytes())
    data[0] ^= 1
    table.write_bytes(data)
    with pytest.raises(InputError, match=r"changed since step split-ple wrote it.*--fresh-from split-ple"):
        run(recipe, copy, source=source)


def test_one_step_can_be_done_again(copy: Path, recipe: Path, source: Path) -> None:
    assert run(recipe, copy, source=source, fresh_from="oracle-check")["ran"] == ["oracle-check"]


def test_an_unknown_step_is_refused_with_the_known_ones(copy: Path, recipe: Path, source: Path) -> None:
    with pytest.raises(InputError, match=r"no step 'quantise'.*split-ple"):
        run(recipe, copy, source=source, fresh_from="quantise")


def test_a_check_that_says_no_stops_the_run_with_1_and_a_report(
    copy: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    strict = _changed(recipe, tmp_path, "verify: {", "verify: {max_kl: 1.0e-9, ")
    done = _call(strict, copy, source, "--fresh-from", "verify")
    assert done.returncode == 1, done.stderr
    assert "step verify: says no" in done.stderr
    report = read_json(copy / "report.json")
    assert (report["passed"], report["failed_step"]) == (False, "verify")
    assert "stopped at verify" in (copy / "report.html").read_text()


def test_a_dry_run_tells_what_is_done_and_writes_nothing(
    finished: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    before = {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    assert {row["state"] for row in dry_run(recipe, finished, source=source)["steps"]} == {"done"}
    redo = dry_run(recipe, finished, source=source, fresh_from="serve")["steps"]
    assert [row["state"] for row in redo] == ["done"] * STEPS.index("serve") + ["to do"] * 3
    assert before == {p: p.stat().st_mtime_ns for p in finished.rglob("*")}
    new = dry_run(recipe, tmp_path / "new", source=source)["steps"]
    assert [row["step"] for row in new] == STEPS
    assert not (tmp_path / "new").exists()


def test_a_dry_run_expects_the_bytes_that_the_run_writes(
    finished: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    expected = {
        row["step"]: row["bytes_out"] for row in dry_run(recipe, tmp_path / "new", source=source)["steps"]
    }
    for step, name in (("split-ple", "ple"), ("quantize", "quantized"), ("requant-int8", "model")):
        directory = finished / name
        data = sum(p.stat().st_size for p in directory.iterdir() if p.suffix in (".bin", ".safetensors"))
        assert expected[step] == pytest.approx(data, rel=0.05)


def test_a_finished_run_becomes_a_release_wherever_it_was_moved(
    finished: Path, copy: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "release"
    build(from_run(copy), out)
    assert check(out, full=True)["passed"]
    document = read_json(out / "RELEASE.json")
    assert [step["step"] for step in document["steps"]] == STEPS
    assert document["recipe"]["name"] == "test-fast"
    assert document["calibration"]["tokens_sha256"]
    assert document["made_on"]["cores"] > 0
    card = (out / "README.md").read_text()
    assert "## Quality" in card and "## Speed" in card
    for file in (path for path in out.rglob("*") if path.suffix in (".json", ".md", ".yaml", ".html")):
        text = file.read_text("utf-8")
        assert not any(str(path) in text for path in (finished, copy, source)), f"{file} names a directory"


def test_a_file_that_changed_since_the_run_is_not_released(copy: Path) -> None:
    (copy / "oracle.json").write_text("{}")
    with pytest.raises(InputError, match=r"oracle\.json: is missing, or changed"):
        from_run(copy)


def test_a_killed_run_leaves_no_process(copy: Path, recipe: Path, source: Path) -> None:
    _kill_in_step(
        _command(recipe, copy, source, "--fresh-from", "serve"), copy, "serve", after=random.uniform(0, 8)
    )


def test_a_run_killed_in_any_step_ends_with_the_same_tensors(
    finished: Path, recipe: Path, source: Path, tmp_path: Path
) -> None:
    seconds = {s["step"]: s["seconds"] for s in read_json(finished / "report.json")["steps"]}
    seed = random.randrange(2**32)
    moment = random.Random(seed)
    work = tmp_path / "work"
    command = _command(recipe, work, source)
    for step in ("split-ple", "quantize", "quantize", "requant-int8"):
        _kill_in_step(command, work, step, after=moment.uniform(0, 0.9 * seconds[step]))
    _kill_in_step(command, work, "build-placement", after=0)
    for name in ("ple", "quantized", "model"):
        ours, theirs = _tensor_files(work / name), _tensor_files(finished / name)
        assert ours.keys() == theirs.keys()
        assert [f for f in ours if ours[f] != theirs[f]] == [], f"{name} differs, seed {seed}"
        assert not (work / name / ".q38").exists()
    assert not list(work.rglob("*.q38-tmp")), f"seed {seed}"


def _done(work: Path, step: str) -> bool:
    return (work / "run.json").exists() and step in read_json(work / "run.json")["steps"]


def _kill_in_step(command: list[str], work: Path, step: str, *, after: float) -> None:
    """Start a run and kill -9 it `after` seconds into a step, or when the step is done; wait for its children.

    Nothing is run when an earlier call came too late and the step is done.
    """
    if _done(work, step) and "--fresh-from" not in command:
        return
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if re.match(rf"\[\d+/\d+\] python -m q38 {step} ", line):
                break
        until = time.monotonic() + after
        while time.monotonic() < until and not _done(work, step):
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 60
    while (left := _processes_about(work)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []
