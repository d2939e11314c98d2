import hashlib
import json
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import q38.cli.split_ple  # noqa: F401 (registers the verb)
from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import Job
from q38.checkpoint.writer import TEMPORARY, FileRecord, write_safetensors
from q38.cli.app import app
from q38.ple import split as split_module
from q38.ple.cast import E4M3_MAX
from q38.ple.split import plan_split, split_ple
from tests.checkpoint.disks import small_disk
from tests.ple.sources import PREFIX, make_source, poisoned

TABLE = "ple.f8_e4m3.bin"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return make_source(tmp_path_factory.mktemp("split") / "bf16")


@pytest.fixture(scope="module")
def fp8_source(tmp_path_factory) -> Path:
    return make_source(tmp_path_factory.mktemp("split") / "fp8", fp8=True)


@pytest.fixture(scope="module")
def table(source, tmp_path_factory) -> bytes:
    """The bytes of an uninterrupted run."""
    out = tmp_path_factory.mktemp("split_once") / "ple"
    split_ple(source, out)
    return (out / TABLE).read_bytes()


def values(source: Path) -> torch.Tensor:
    checkpoint = Checkpoint.open(source)
    return torch.cat([checkpoint.read(f"{PREFIX}.shard_{n}.weight") for n in range(12)])


def snapshot(directory: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in directory.iterdir()}


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.rglob("*"))


def test_a_bf16_table_is_cast_with_one_scale_in_shard_order(source, tmp_path):
    info = split_ple(source, tmp_path / "ple")
    clamped = (values(source).float() / info["weight_scale"]).clamp(-E4M3_MAX, E4M3_MAX)
    expected = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
    assert (tmp_path / "ple" / TABLE).read_bytes() == expected


def test_the_error_of_the_cast_is_reported(source, tmp_path):
    info = split_ple(source, tmp_path / "ple")
    assert 0.01 < info["quantization"]["relative_error"] < 0.05
    assert info["quantization"]["saturated"] == 0


def test_fp8_shards_are_carried_over_byte_for_byte_with_their_scale(fp8_source, tmp_path):
    info = split_ple(fp8_source, tmp_path / "ple")
    assert (tmp_path / "ple" / TABLE).read_bytes() == values(fp8_source).view(torch.uint8).numpy().tobytes()
    assert (info["weight_scale"], info["quantization"]) == (1 / 4096, None)


def test_a_bf16_table_can_be_kept_as_it_is(source, tmp_path):
    info = split_ple(source, tmp_path / "ple", dtype="source")
    stored = (tmp_path / "ple" / "ple.bf16.bin").read_bytes()
    assert stored == values(source).view(torch.uint8).numpy().tobytes()
    assert (info["dtype"], info["weight_scale"]) == ("BF16", None)


def test_ple_json_tells_what_the_table_is_and_where_it_came_from(source, table, tmp_path):
    info = split_ple(source, tmp_path / "ple")
    assert info == json.loads((tmp_path / "ple" / "ple.json").read_text())
    assert info["rows"] * info["dim"] == info["bytes"] == len(table)
    assert info["sha256"] == hashlib.sha256(table).hexdigest()
    assert sum(info["rows_per_shard"]) == info["rows"]
    assert (info["n_shards"], info["layer"], info["dtype"]) == (12, 1, "F8_E4M3")
    assert info["source"]["files"].keys() == {p.name for p in source.glob("*.safetensors")}


def test_the_source_is_not_touched(source, tmp_path):
    before = snapshot(source)
    split_ple(source, tmp_path / "ple")
    assert snapshot(source) == before


@pytest.mark.parametrize("chunk", [1, 1000, 2**22])
def test_the_bytes_do_not_depend_on_the_chunk_size(source, table, tmp_path, chunk):
    out = tmp_path / "ple"
    split_ple(source, out, chunk=max(chunk, 512))
    assert (out / TABLE).read_bytes() == table


def test_the_second_run_writes_nothing(source, tmp_path):
    split_ple(source, tmp_path / "ple")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "ple").iterdir()}
    split_ple(source, tmp_path / "ple")
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "ple").iterdir()} == before


class Killed(BaseException):
    """Stands for kill -9: nothing handles it."""


def kill_at(monkeypatch, unit: str) -> None:
    """Die just before the journal line of `unit`."""
    commit = Job.commit

    def stop(job, name, **kwargs):
        if name == unit:
            raise Killed
        commit(job, name, **kwargs)

    monkeypatch.setattr(Job, "commit", stop)


@pytest.mark.parametrize(
    "unit", ["range-0", "range-7", "shard-0", "shard-6", "shard-11", "table", "ple.json"]
)
def test_a_run_killed_before_any_journal_line_resumes_to_the_same_bytes(source, table, tmp_path, unit):
    out = tmp_path / "ple"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, unit)
        split_ple(source, out)
    split_ple(source, out)
    assert (out / TABLE).read_bytes() == table
    assert names(out) == ["MANIFEST.json", "ple.f8_e4m3.bin", "ple.json"]


def test_a_table_that_was_whole_is_not_read_from_the_source_again(source, table, tmp_path, monkeypatch):
    out = tmp_path / "ple"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "table")  # renamed, not yet in the journal
        split_ple(source, out)
    read = []
    original = split_module.read_tensors
    monkeypatch.setattr(split_module, "read_tensors", lambda t, *rest: read.extend(t) or original(t, *rest))
    split_ple(source, out)
    assert read == []
    assert (out / TABLE).read_bytes() == table


def test_a_resumed_run_reports_the_same_error_as_an_uninterrupted_one(source, tmp_path):
    once = split_ple(source, tmp_path / "once")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "shard-6")
        split_ple(source, tmp_path / "twice")
    assert split_ple(source, tmp_path / "twice") == once


def test_a_finished_part_that_changed_on_disk_is_written_again(source, table, tmp_path):
    out = tmp_path / "ple"
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "shard-6")
        split_ple(source, out)
    partial = out / ".q38" / f"{TABLE}.partial"
    damaged = bytearray(partial.read_bytes())
    damaged[40_000] ^= 0xFF  # inside shard 1
    partial.write_bytes(damaged)
    split_ple(source, out)
    assert (out / TABLE).read_bytes() == table


def test_a_source_that_changed_between_two_runs_is_refused_by_name(tmp_path):
    source = make_source(tmp_path / "source")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        kill_at(patch, "shard-6")
        split_ple(source, tmp_path / "ple")
    file = source / "model-00002-of-00003.safetensors"
    changed = bytearray(file.read_bytes())
    changed[-1] ^= 1
    file.write_bytes(changed)
    with pytest.raises(InputError, match="model-00002-of-00003"):
        split_ple(source, tmp_path / "ple")


def test_fresh_starts_over_with_another_source(source, fp8_source, tmp_path):
    split_ple(source, tmp_path / "ple")
    info = split_ple(fp8_source, tmp_path / "ple", fresh=True)
    assert info["source"]["dtype"] == "F8_E4M3"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_table_with_nan_or_infinity_is_refused_before_anything_is_written(tmp_path, value):
    source = make_source(tmp_path / "source", files=1)
    file = source / "model-00001-of-00001.safetensors"
    checkpoint = Checkpoint.open(source)
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    tensors[f"{PREFIX}.shard_4.weight"][9, 3] = value
    write_safetensors(file, tensors)
    with pytest.raises(InputError, match=r"shard_4.weight holds NaN or infinity"):
        split_ple(source, tmp_path / "ple")
    assert not list((tmp_path / "ple").rglob("*.bin*"))


@pytest.mark.parametrize(("fp8", "dtype"), [(True, "f8_e4m3"), (True, "source"), (False, "source")])
def test_a_table_that_is_carried_over_with_a_value_that_is_no_number_is_refused(tmp_path, fp8, dtype):
    source = poisoned(make_source(tmp_path / "source", fp8=fp8), row=1000)
    with pytest.raises(InputError, match=r"shard_4.weight holds NaN or infinity") as caught:
        split_ple(source, tmp_path / "ple", dtype=dtype)
    assert caught.value.where.endswith("00002-of-00003.safetensors")
    assert not list((tmp_path / "ple").glob("ple*"))


@pytest.mark.parametrize("fresh", [False, True])
def test_the_source_is_refused_as_output_and_the_table_may_lie_in_it(tmp_path, fresh):
    source = make_source(tmp_path / "source")
    before = snapshot(source)
    with pytest.raises(InputError, match="would share a directory with an input"):
        split_ple(source, source, fresh=fresh)
    assert snapshot(source) == before
    split_ple(source, source / "ple", fresh=fresh)


def test_fresh_does_not_remove_what_another_step_wrote(source, tmp_path):
    with Job(tmp_path / "model", "quantize", {}) as job:
        (tmp_path / "model" / "shard").write_bytes(b"dear")
        job.commit("all", files={"shard": FileRecord(4, "h")})
        job.finish()
    with pytest.raises(InputError, match="was written by q38 quantize"):
        split_ple(source, tmp_path / "model", fresh=True)
    assert (tmp_path / "model" / "shard").exists()


def test_too_little_free_space_is_refused_before_the_first_byte(source, tmp_path, monkeypatch):
    def full(directory, needed):
        raise ResourceError(f"{needed} needed", where=directory)

    monkeypatch.setattr(split_module, "require_free_space", full)
    with pytest.raises(ResourceError, match="335872 needed"):
        split_ple(source, tmp_path / "ple")
    assert not list((tmp_path / "ple").rglob("*.bin*"))


def test_a_table_that_does_not_hold_what_was_read_never_gets_its_name(source, tmp_path, monkeypatch):
    def deny(*args, **kwargs):
        raise CheckFailed("row 0 differs")

    monkeypatch.setattr(split_module, "compare_table", deny)
    with pytest.raises(CheckFailed):
        split_ple(source, tmp_path / "ple")
    assert not (tmp_path / "ple" / TABLE).exists()


def test_the_plan_counts_both_passes_and_writes_nothing(source, tmp_path):
    plan = plan_split(source)
    assert (plan["reads"], plan["writes"]) == (2 * 2 * 335_872, 335_872)
    assert not list(tmp_path.iterdir())


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "q38", "split-ple", *map(str, args)]


def test_a_full_disk_is_one_line_and_the_same_command_resumes(source, table, tmp_path):
    def limit_file_size():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    run = subprocess.run(
        command(source, "-o", tmp_path / "ple"), preexec_fn=limit_file_size, capture_output=True, text=True
    )
    assert run.returncode == 3
    assert run.stderr.splitlines()[-1].startswith("q38: ")
    assert "Traceback" not in run.stderr
    split_ple(source, tmp_path / "ple")
    assert (tmp_path / "ple" / TABLE).read_bytes() == table


def test_a_disk_that_fills_in_the_middle_keeps_what_was_finished(source, table, tmp_path, monkeypatch):
    monkeypatch.setattr(
        split_module, "require_free_space", lambda *_: None
    )  # as if another program took the rest
    with small_disk(tmp_path / "disk", "200k") as disk:
        with pytest.raises(ResourceError, match="the disk is full"):
            split_ple(source, disk / "ple")
        assert not (disk / "ple" / "ple.json").exists()
        subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
        split_ple(source, disk / "ple")
        assert (disk / "ple" / TABLE).read_bytes() == table


def test_a_read_only_target_is_refused(source, tmp_path):
    with (
        small_disk(tmp_path / "disk", read_only=True) as disk,
        pytest.raises(InputError, match="Read-only"),
    ):
        split_ple(source, disk / "ple")


def test_kill_9_at_random_points_leaves_the_same_bytes_and_no_temporaries(tmp_path):
    source = make_source(tmp_path / "source", vocab_base=100_000, parts=48)
    expected = split_ple(source, tmp_path / "once")
    out = tmp_path / "ple"
    journal = out / ".q38" / "journal.jsonl"
    for lines in sorted(random.Random(38).sample(range(2, 95), 3)):  # of 48 in each of the two passes
        process = subprocess.Popen(
            command(source, "-o", out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        while process.poll() is None and not (
            journal.exists() and journal.read_bytes().count(b"\n") >= lines
        ):
            time.sleep(0.0005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, "the run ended before the kill"
    subprocess.run(command(source, "-o", out), check=True, capture_output=True)
    assert (out / TABLE).read_bytes() == (tmp_path / "once" / TABLE).read_bytes()
    assert json.loads((out / "ple.json").read_text()) == expected
    assert names(out) == ["MANIFEST.json", "ple.f8_e4m3.bin", "ple.json"]
    assert not [name for name in names(tmp_path) if name.endswith(TEMPORARY)]


def test_the_command_prints_one_json_document(source, tmp_path):
    run = CliRunner().invoke(app, ["split-ple", str(source), "-o", str(tmp_path / "ple"), "--json"])
    assert json.loads(run.stdout)["rows"] == 20_992


def test_a_dry_run_writes_nothing(source, tmp_path):
    run = CliRunner().invoke(
        app, ["split-ple", str(source), "-o", str(tmp_path / "ple"), "--dry-run", "--json"]
    )
    assert json.loads(run.stdout)["writes"] == 335_872
    assert not list(tmp_path.iterdir())


def test_the_command_verifies_with_exit_code_1_on_a_miss(source, fp8_source, tmp_path):
    split_ple(fp8_source, tmp_path / "ple")
    runner = CliRunner()
    assert runner.invoke(app, ["split-ple", "--verify", str(tmp_path / "ple"), "--full"]).exit_code == 0
    verify = ["split-ple", "--verify", str(tmp_path / "ple"), "--against"]
    assert runner.invoke(app, [*verify, str(fp8_source)]).exit_code == 0
    assert runner.invoke(app, [*verify, str(source)]).exit_code == 1


@pytest.mark.parametrize("arguments", [[], ["SRC"], ["SRC", "--verify", "DIR"]])
def test_the_command_refuses_arguments_that_do_not_belong_together(arguments):
    assert CliRunner().invoke(app, ["split-ple", *arguments]).exit_code == 2
