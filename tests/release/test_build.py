"""q38 release build: what it takes, what it refuses, and that nothing stops it half-way for good."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.checkpoint.index import read_json
from q38.release import build as module
from q38.release.build import build
from q38.release.check import check
from q38.release.collect import from_model
from q38.release.layout import files_below
from q38.release.seal import read_seal
from tests.checkpoint.disks import small_disk
from tests.release.test_check import flip

SHARD = "model-00002-of-00003.safetensors"
REPORT = {"schema": "q38.verify/1", "passed": True, "parts": []}


@pytest.fixture
def model(packed: Path, tmp_path: Path) -> Path:
    """A copy of the model, to break."""
    return Path(shutil.copytree(packed, tmp_path / "model"))


def tree(root: Path) -> dict[str, tuple[int, int, int]]:
    """Every file with its size, time and mode."""
    return {
        name: (s.st_size, s.st_mtime_ns, stat.S_IMODE(s.st_mode))
        for name, path in files_below(root).items()
        for s in [path.stat()]
    }


def test_a_release_holds_the_model_the_table_the_card_and_the_sums(packed: Path, sealed: Path) -> None:
    files = set(files_below(packed)) | {"README.md", ".gitattributes", "SHA256SUMS", "RELEASE.json"}
    assert set(files_below(sealed)) == files
    for name, path in files_below(packed).items():
        assert (sealed / name).read_bytes() == path.read_bytes()
    document = read_json(sealed / "RELEASE.json")
    assert set(document["files"]) == files - {"RELEASE.json"}
    for name, record in document["files"].items():
        data = (sealed / name).read_bytes()
        assert (record["bytes"], record["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())


def test_sha256sum_agrees(sealed: Path) -> None:
    done = subprocess.run(
        ["sha256sum", "--strict", "-c", "SHA256SUMS"], cwd=sealed, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(files_below(sealed)) - 2


def test_the_hubs_client_takes_every_file_and_computes_the_same_hash(sealed: Path) -> None:
    from huggingface_hub import CommitOperationAdd

    for name, record in read_seal(sealed).files.items():
        operation = CommitOperationAdd(path_in_repo=name, path_or_fileobj=sealed / name)
        assert (operation.upload_info.sha256.hex(), operation.upload_info.size) == (
            record.sha256,
            record.bytes,
        )


def test_the_seal_tells_where_the_model_comes_from(packed: Path, tmp_path: Path) -> None:
    recipe = Path(__file__).parents[1] / "data" / "fast.yaml"
    build(from_model(packed, recipe=recipe), tmp_path / "out")
    document = read_json(tmp_path / "out" / "RELEASE.json")
    manifest = read_json(packed / "MANIFEST.json")
    assert document["recipe"]["text"] == recipe.read_text()
    assert document["source"] == manifest["identity"]["source"]
    assert [step["step"] for step in document["steps"]] == ["quantize", "split-ple"]
    assert document["packages"] == manifest["versions"]
    assert {"huggingface_hub", "safetensors"} <= document["sealed_with"]["packages"].keys()


def test_files_are_links_and_the_inputs_stay_as_they_are(model: Path, tmp_path: Path) -> None:
    before = tree(model)
    result = build(from_model(model), tmp_path / "out")
    assert tree(model) == before
    assert result["linked"] == len(before)
    assert (tmp_path / "out" / SHARD).samefile(model / SHARD)
    assert check(tmp_path / "out", full=True)["passed"]


def test_with_copy_nothing_is_shared(model: Path, tmp_path: Path) -> None:
    result = build(from_model(model), tmp_path / "out", copy=True)
    assert result["linked"] == 0
    flip(model / SHARD, 5000, 0)
    assert check(tmp_path / "out", full=True)["passed"]


def test_where_links_are_refused_files_are_copied(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert build(from_model(model), tmp_path / "out")["linked"] == 0
    assert check(tmp_path / "out", full=True)["passed"]


def test_only_what_lies_on_another_disk_is_copied(model: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        shutil.move(model / "ple", disk / "ple")
        contents = from_model(model, ple=disk / "ple")
        table = sum(p.stat().st_size for p in (disk / "ple").iterdir())
        assert build(contents, tmp_path / "out", dry_run=True)["writes"] == table
        result = build(contents, tmp_path / "out")
    assert result["linked"] == len(files_below(model))
    assert check(tmp_path / "out", full=True)["passed"]


def test_read_only_takes_away_every_write_permission_but_not_the_inputs(model: Path, tmp_path: Path) -> None:
    before, out = tree(model), tmp_path / "out"
    build(from_model(model), out, read_only=True)
    assert tree(model) == before
    for path in [out, *out.rglob("*")]:
        assert not path.stat().st_mode & 0o222, path
    assert check(out, full=True)["passed"]
    assert build(from_model(model), out, read_only=True)["up_to_date"]
    assert not build(from_model(model), out, read_only=True, fresh=True)["up_to_date"]


def test_the_same_command_again_changes_nothing(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = build(from_model(model), out)
    before = tree(out)
    again = build(from_model(model), out)
    assert again == {**first, "up_to_date": True}
    assert tree(out) == before


def test_another_model_into_the_same_directory_is_refused_until_fresh(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    build(from_model(model), out)
    quality = tmp_path / "quality.json"
    quality.write_text(json.dumps(REPORT))
    with pytest.raises(InputError, match=r"was begun without inputs\.records/quality"):
        build(from_model(model, quality=quality), out)
    build(from_model(model, quality=quality), out, fresh=True)
    assert check(out, full=True)["passed"]
    assert "records/quality.json" in read_seal(out).files


def test_a_dry_run_writes_nothing_and_tells_what_would_be_written(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    plan = build(from_model(model), out, dry_run=True)
    assert not out.exists()
    assert (plan["writes"], plan["bytes"]) == (0, sum(p.stat().st_size for p in files_below(model).values()))
    assert build(from_model(model), out, dry_run=True, copy=True)["writes"] == plan["bytes"]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: (m / ".q38").mkdir(), "not finished"),
        (lambda m: (m / "MANIFEST.json").unlink(), "has no MANIFEST.json"),
        (lambda m: (m / "x.q38-tmp").write_text(""), r"x\.q38-tmp: is a file that was not finished"),
        (lambda m: (m / "notes.txt").write_text("x"), r"does not list: notes\.txt"),
        (lambda m: (m / "ple" / "y").write_text("x"), r"does not list: y"),
        (lambda m: (m / SHARD).unlink(), f"{SHARD}: is missing"),
        (lambda m: os.truncate(m / SHARD, 100), f"{SHARD}: is missing or of another size"),
        (lambda m: (m / "ple" / "ple.f8_e4m3.bin").unlink(), "is missing"),
        (lambda m: shutil.rmtree(m), "no such directory"),
    ],
)
def test_what_is_not_finished_or_not_ours_is_refused(
    model: Path, tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(model)
    with pytest.raises(InputError, match=message):
        from_model(model)
    assert not (tmp_path / "out").exists()


def test_a_link_that_leaves_the_directory_is_refused_and_one_that_stays_is_resolved(
    model: Path, tmp_path: Path
) -> None:
    (model / SHARD).rename(tmp_path / "shard")
    (model / SHARD).symlink_to(tmp_path / "shard")
    with pytest.raises(InputError, match="leaves the directory"):
        from_model(model)
    (model / SHARD).unlink()
    (tmp_path / "shard").rename(model / ".hidden")
    (model / SHARD).symlink_to(".hidden")
    with pytest.raises(InputError, match=r"does not list: \.hidden"):
        from_model(model)


def test_a_shard_that_is_not_what_its_step_wrote_is_refused_by_its_hash(model: Path, tmp_path: Path) -> None:
    flip(model / SHARD, (model / SHARD).stat().st_size - 1, 3)
    with pytest.raises(CheckFailed, match=f"{SHARD}: is not what its step wrote"):
        build(from_model(model), tmp_path / "out")
    assert not (tmp_path / "out" / SHARD).exists()


def test_a_checkpoint_with_faults_is_refused(model: Path) -> None:
    config = read_json(model / "config.json")
    config["text_config"]["num_experts"] += 1
    text = json.dumps(config)
    (model / "config.json").write_text(text)
    manifest = read_json(model / "MANIFEST.json")
    manifest["files"]["config.json"] = {
        "bytes": len(text),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    (model / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckFailed, match="has faults"):
        from_model(model)


def test_a_release_does_not_go_into_the_model_nor_beside_strangers(model: Path, tmp_path: Path) -> None:
    for out in (model, model / "release", model / "ple"):
        with pytest.raises(InputError):
            build(from_model(model), out)
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="files that q38 did not write"):
        build(from_model(model), full)


def test_a_manifest_that_names_a_file_outside_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    manifest = json.loads((model / "MANIFEST.json").read_text())
    manifest["files"]["../precious"] = {"bytes": 1, "sha256": "h"}
    (model / "MANIFEST.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"names the file '\.\./precious' outside the directory"):
        from_model(model)


def test_fresh_does_not_remove_a_release_that_holds_an_input(
    model: Path, sealed: Path, tmp_path: Path
) -> None:
    release = Path(shutil.copytree(sealed, tmp_path / "sealed"))
    report = release / "records" / "speed.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text('{"schema": "q38.bench/1"}')
    with pytest.raises(InputError, match="would share a directory with an input"):
        build(from_model(model, speed=report), release, fresh=True)
    assert (release / "RELEASE.json").exists()


def test_a_report_that_is_none_is_refused(model: Path, tmp_path: Path) -> None:
    report = tmp_path / "x.json"
    report.write_text(json.dumps(REPORT))
    with pytest.raises(InputError, match=r"is no q38\.bench document"):
        from_model(model, speed=report)


KILLS: dict[str, Any] = {
    "after the first file": ("commit", 1),
    "in the middle": ("commit", 8),
    "in the middle of a file": ("hash", 20),
    "before the seal": ("write_seal", 1),
    "before the journal is gone": ("rmtree", 1),
}


@pytest.mark.parametrize("moment", KILLS)
@pytest.mark.parametrize("copy", [False, True], ids=["links", "copies"])
def test_a_killed_build_ends_with_the_same_command(
    model: Path, tmp_path: Path, moment: str, copy: bool
) -> None:
    out, contents = tmp_path / "out", from_model(model)
    killed_at(*KILLS[moment], lambda: build(contents, out, copy=copy))
    result = build(contents, out, copy=copy)
    assert result["up_to_date"] == (moment == "before the journal is gone")
    assert check(out, full=True)["passed"]  # no temporary, no journal, no file missing
    whole = build(contents, tmp_path / "whole", copy=copy)
    assert read_seal(out).files == read_seal(tmp_path / "whole").files
    assert result["linked"] == whole["linked"]


def killed_at(point: str, count: int, action: Callable[[], object]) -> None:
    """Run `action` in a child that kills itself with SIGKILL at the `count`th call of a function."""
    pid = os.fork()
    if pid == 0:
        owner: Any
        owner, name = {
            "commit": (module.ReleaseJob, "commit"),
            "hash": (module.Hasher, "update"),
            "write_seal": (module, "write_seal"),
            "rmtree": (module.shutil, "rmtree"),
        }[point]
        real, calls = getattr(owner, name), []

        def kill_or_call(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            if len(calls) == count and point != "commit":
                os.kill(os.getpid(), signal.SIGKILL)
            result = real(*arguments, **options)
            if len(calls) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(owner, name, kill_or_call)
        try:
            action()
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def test_files_placed_before_a_kill_are_not_hashed_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    killed_at("write_seal", 1, lambda: build(from_model(model), out))
    flip(model / SHARD, (model / SHARD).stat().st_size - 1, 0)  # and so in the link: its time tells
    hashed: list[str] = []
    real = module.hash_file
    monkeypatch.setattr(module, "hash_file", lambda f, *a, **k: hashed.append(f.name) or real(f, *a, **k))
    with pytest.raises(CheckFailed, match="is not what its step wrote"):
        build(from_model(model), out)
    assert hashed == [SHARD]


def test_a_full_disk_is_told_before_the_first_byte(model: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "2m") as disk:
        with pytest.raises(ResourceError, match="short"):
            build(from_model(model), disk / "out")
        assert not list((disk / "out").rglob("*.safetensors"))


def test_a_disk_that_fills_up_is_told_and_the_build_goes_on_with_more_room(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_disk(tmp_path / "disk", "4m") as disk:
        with monkeypatch.context() as patch:
            patch.setattr(module, "require_free_space", lambda *_: None)
            with pytest.raises(ResourceError, match="the disk is full"):
                build(from_model(model), disk / "out")
        subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
        build(from_model(model), disk / "out")
        assert check(disk / "out", full=True)["passed"]


def test_a_directory_that_cannot_be_written_is_refused(model: Path, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", read_only=True) as disk,
        pytest.raises(InputError, match="cannot be written"),
    ):
        build(from_model(model), disk / "out")
