import json
import subprocess
import sys
from pathlib import Path

import pytest

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.job import MANIFEST, Job, first_difference
from q38.checkpoint.writer import TEMPORARY, atomic_file
from tests.checkpoint.disks import small_disk

IDENTITY = {"source": {"a.safetensors": "1"}, "recipe": {"bits": 2}}


class Killed(BaseException):
    """Stands for kill -9: nothing handles it."""


def write(out: Path, name: str, content: bytes = b"content"):
    with atomic_file(out / name) as f:
        f.write(content)
    return f.record()


def run(
    out: Path, units: int = 3, *, identity: object = IDENTITY, fresh: bool = False, stop_before: str = ""
) -> list[str]:
    """A step of `units` units, each writing one file. Returns the units it had to do."""
    did = []
    with Job(out, "step", identity, fresh=fresh) as job:  # type: ignore[arg-type]
        if job.up_to_date:
            return did
        for unit in (f"u{n}" for n in range(units)):
            if unit not in job.done:
                record = write(out, unit)
                if unit == stop_before:
                    raise Killed
                job.commit(unit, files={unit: record}, result=len(did))
                did.append(unit)
        job.finish({"units": units})
    return did


def broken_off(out: Path, unit: str = "u2") -> None:
    with pytest.raises(Killed):
        run(out, stop_before=unit)


def journal(out: Path) -> Path:
    return out / ".q38" / "journal.jsonl"


def content(out: Path) -> list[str]:
    return sorted(p.relative_to(out).as_posix() for p in out.rglob("*"))


def test_a_finished_job_leaves_its_files_and_a_manifest(tmp_path):
    run(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    assert content(tmp_path) == [MANIFEST, "u0", "u1", "u2"]
    assert manifest["identity"] == IDENTITY
    assert manifest["files"]["u1"]["bytes"] == 7
    assert manifest["result"] == {"units": 3}
    assert "torch" in manifest["versions"]


def test_the_second_run_has_nothing_to_do(tmp_path):
    run(tmp_path)
    before = (tmp_path / MANIFEST).stat().st_mtime_ns
    assert run(tmp_path) == []
    assert (tmp_path / MANIFEST).stat().st_mtime_ns == before


def test_a_run_killed_between_rename_and_commit_does_that_unit_again(tmp_path):
    broken_off(tmp_path)
    assert (tmp_path / "u2").exists()
    assert run(tmp_path) == ["u2"]


def test_results_of_finished_units_come_back(tmp_path):
    broken_off(tmp_path)
    with Job(tmp_path, "step", IDENTITY) as job:
        assert {unit: line["result"] for unit, line in job.done.items()} == {"u0": 0, "u1": 1}


def test_a_torn_last_journal_line_is_cut_off_and_its_unit_done_again(tmp_path):
    broken_off(tmp_path)
    with journal(tmp_path).open("ab") as f:
        f.write(b'{"unit": "u2", "fil')
    assert run(tmp_path) == ["u2"]


def test_lines_after_a_torn_one_can_be_read(tmp_path):
    broken_off(tmp_path)
    with journal(tmp_path).open("ab") as f:
        f.write(b'{"unit": "u2", "fil')
    with pytest.raises(Killed):
        run(tmp_path, 4, stop_before="u3")
    assert run(tmp_path, 4) == ["u3"]


def test_a_last_line_without_its_end_counts_as_torn(tmp_path):
    broken_off(tmp_path)
    data = journal(tmp_path).read_bytes()
    journal(tmp_path).write_bytes(data[:-1])
    assert run(tmp_path) == ["u1", "u2"]


@pytest.mark.parametrize(
    "line", [b"{nonsense", b"[]", b'{"files": {}}', b'{"unit": "u", "files": {"u0": 1}}']
)
def test_a_journal_damaged_in_the_middle_is_refused(tmp_path, line):
    broken_off(tmp_path)
    journal(tmp_path).write_bytes(line + b"\n" + journal(tmp_path).read_bytes())
    with pytest.raises(InputError, match="journal of the unfinished run is damaged"):
        run(tmp_path)
    assert run(tmp_path, fresh=True) == ["u0", "u1", "u2"]


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"cut")])
def test_a_finished_unit_whose_file_was_lost_is_done_again(tmp_path, damage):
    broken_off(tmp_path)
    damage(tmp_path / "u0")
    assert run(tmp_path) == ["u0", "u2"]
    assert (tmp_path / "u0").read_bytes() == b"content"


def test_a_run_killed_before_the_identity_was_written_starts_over(tmp_path):
    (tmp_path / "out" / ".q38").mkdir(parents=True)
    assert run(tmp_path / "out") == ["u0", "u1", "u2"]


def test_a_run_killed_after_the_manifest_only_cleans_up(tmp_path):
    run(tmp_path)
    (tmp_path / ".q38").mkdir()
    (tmp_path / ".q38" / "job.json").write_text("{}")
    assert run(tmp_path) == []
    assert not (tmp_path / ".q38").exists()


def test_temporaries_of_a_killed_run_are_removed(tmp_path):
    broken_off(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / f"x{TEMPORARY}").write_bytes(b"half")
    run(tmp_path)
    assert not list(tmp_path.rglob(f"*{TEMPORARY}"))


def test_a_directory_with_files_of_others_is_refused_and_untouched(tmp_path):
    (tmp_path / "mine").write_bytes(b"precious")
    with pytest.raises(InputError, match="holds files that q38 did not write"):
        run(tmp_path)
    with pytest.raises(InputError, match="holds files that q38 did not write"):
        run(tmp_path, fresh=True)
    assert content(tmp_path) == ["mine"]


def test_a_manifest_of_something_else_is_refused(tmp_path):
    (tmp_path / MANIFEST).write_text('{"files": ["a"]}')
    with pytest.raises(InputError, match="was not written by this version of q38"):
        run(tmp_path)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path):
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be written"):
        run(tmp_path / "out")


def test_a_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "out").write_bytes(b"")
    with pytest.raises(InputError, match="cannot be written"):
        run(tmp_path / "out" / "deeper")


def test_a_read_only_disk_is_refused(tmp_path):
    with small_disk(tmp_path / "disk", read_only=True) as disk, pytest.raises(InputError, match="Read-only"):
        run(disk / "out")


def test_a_full_disk_is_refused_and_the_same_call_resumes_once_there_is_space(tmp_path):
    with small_disk(tmp_path / "disk") as disk:
        out = disk / "out"
        broken_off(out)
        (disk / "ballast").write_bytes(bytes(2**18 - sum(f.stat().st_size for f in out.rglob("*")) - 2**16))
        with pytest.raises(ResourceError, match="the disk is full"), Job(out, "step", IDENTITY):
            write(out, "big", bytes(2**20))
        (disk / "ballast").unlink()
        assert run(out) == ["u2"]


@pytest.mark.parametrize("when", ["unfinished", "finished"])
def test_another_identity_is_refused_and_its_first_difference_named(tmp_path, when):
    broken_off(tmp_path) if when == "unfinished" else run(tmp_path)
    changed = {**IDENTITY, "recipe": {"bits": 3}}
    with pytest.raises(InputError, match=r"another recipe\.bits \(2, now 3\)"):
        run(tmp_path, identity=changed)
    with pytest.raises(InputError, match=r"was begun without more \(1 now\)"):
        run(tmp_path, identity={**IDENTITY, "more": 1})


def test_another_step_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(InputError, match="was written by q38 step"), Job(tmp_path, "other", IDENTITY):
        pass


@pytest.mark.parametrize("when", ["unfinished", "finished"])
def test_fresh_removes_what_was_recorded_and_starts_over(tmp_path, when):
    broken_off(tmp_path) if when == "unfinished" else run(tmp_path)
    assert run(tmp_path, 2, identity={"other": 1}, fresh=True) == ["u0", "u1"]
    recorded = json.loads((tmp_path / MANIFEST).read_text())["files"]
    assert recorded.keys() == {"u0", "u1"}
    assert when == "unfinished" or not (tmp_path / "u2").exists()


def test_fresh_does_not_touch_files_of_others(tmp_path):
    run(tmp_path)
    (tmp_path / "note.txt").write_text("mine")
    run(tmp_path, fresh=True)
    assert (tmp_path / "note.txt").read_text() == "mine"


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"cut")])
def test_a_finished_output_that_lost_a_file_is_refused_and_fresh_rebuilds_it(tmp_path, damage):
    run(tmp_path)
    damage(tmp_path / "u1")
    with pytest.raises(InputError, match="now missing or of another size") as caught:
        run(tmp_path)
    assert caught.value.where == str(tmp_path / "u1")
    assert run(tmp_path, fresh=True) == ["u0", "u1", "u2"]


def test_two_processes_cannot_fill_one_directory(tmp_path):
    code = (
        "import sys; from pathlib import Path; from q38.checkpoint.job import Job\n"
        "with Job(Path(sys.argv[1]), 'step', {}):\n print('in', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        with pytest.raises(InputError, match="another q38 process is writing here"):
            run(tmp_path, identity={})
        other.kill()
        other.wait()
        assert run(tmp_path, identity={}) == ["u0", "u1", "u2"]


@pytest.mark.parametrize(
    ("before", "now", "difference"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 1, "c": 3}}, ("a.c", "2", "3")),
        ({"a": 1}, {"a": 1, "b": 2}, ("b", "not recorded", "2")),
        ({"a": 1, "b": None}, {"a": 1, "b": 2}, ("b", "null", "2")),
        ({"a": 1}, {"a": 1, "b": None}, None),
        ({"a": [1, 2]}, {"a": [1, 3]}, ("a", "[1, 2]", "[1, 3]")),
        (1, 2, ("identity", "1", "2")),
    ],
)
def test_the_first_difference_is_named_by_its_dotted_key(before, now, difference):
    assert first_difference(before, now) == difference
