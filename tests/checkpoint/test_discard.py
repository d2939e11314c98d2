"""Removing what a job wrote, and nothing else."""

from pathlib import Path

import pytest

from q38.checkpoint.job import Job, discard
from q38.checkpoint.writer import FileRecord


def _job(out: Path, *, finish: bool) -> None:
    with Job(out, "test", {"a": 1}) as job:
        (out / "sub").mkdir(exist_ok=True)
        (out / "sub" / "w").write_bytes(b"x")
        job.commit("one", files={"sub/w": FileRecord(1, "h")})
        if finish:
            job.finish()
        else:
            (out / "half.q38-tmp").write_bytes(b"x")


@pytest.mark.parametrize("finish", [True, False])
def test_a_finished_or_broken_off_job_is_removed_whole(tmp_path: Path, finish: bool) -> None:
    _job(tmp_path / "out", finish=finish)
    discard(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_files_of_others_stay(tmp_path: Path) -> None:
    _job(tmp_path / "out", finish=True)
    (tmp_path / "out" / "sub" / "notes").write_text("mine")
    discard(tmp_path / "out")
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()] == [Path("out/sub/notes")]


def test_a_single_file_is_removed_and_an_absent_one_is_no_error(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("x")
    discard(file)
    discard(file)
    assert not file.exists()


def test_a_torn_last_line_of_the_journal_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "out"
    _job(out, finish=False)
    with (out / ".q38" / "journal.jsonl").open("ab") as f:
        f.write(b'{"unit": "tw')
    discard(out)
    assert not out.exists()
