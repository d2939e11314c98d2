"""Starting over: what --fresh removes, what it refuses to touch, and a kill in its middle."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.base.progress import SILENT, Task
from q38.checkpoint.job import MANIFEST, Job, discard, read_manifest
from q38.checkpoint.writer import FileRecord
from tests.checkpoint.test_job import IDENTITY, Killed, broken_off, content, journal, run

USES: dict[str, Callable[[Path], object]] = {
    "run": run,
    "fresh": lambda out: run(out, fresh=True),
    "discard": discard,
}


class Heard:
    """A progress that keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    @contextmanager
    def task(self, label: str, total: float | None, unit: str = "B", done: float = 0) -> Iterator[Task]:
        with SILENT.task(label, total, unit, done) as task:
            yield task

    def say(self, text: str) -> None:
        self.said.append(text)


def _start(out: Path, **options: object) -> None:
    with Job(out, "step", IDENTITY, **options):  # type: ignore[arg-type]
        pass


class TestInputs:
    @pytest.mark.parametrize("fresh", [False, True])
    @pytest.mark.parametrize("place", ["in", "in/deeper", "."])
    def test_an_output_that_is_an_input_lies_in_one_or_holds_one_is_refused(
        self, tmp_path: Path, place: str, fresh: bool
    ) -> None:
        run(tmp_path / "work" / "in")
        before = content(tmp_path)
        with pytest.raises(InputError, match="would share a directory with an input"):
            _start(tmp_path / "work" / place, inputs=(None, tmp_path / "work" / "in"), fresh=fresh)
        assert content(tmp_path) == before

    def test_a_link_to_an_input_is_the_input(self, tmp_path: Path) -> None:
        run(tmp_path / "in")
        (tmp_path / "other").symlink_to("in")
        with pytest.raises(InputError, match="would share a directory with an input"):
            _start(tmp_path / "other", inputs=(tmp_path / "in",), fresh=True)

    def test_an_input_of_links_is_where_they_lead(self, tmp_path: Path) -> None:
        run(tmp_path / "store")
        (tmp_path / "in").mkdir()
        (tmp_path / "in" / "shard").symlink_to("../store/u0")
        with pytest.raises(InputError, match="would share a directory with an input"):
            _start(tmp_path / "store", inputs=(tmp_path / "in",), fresh=True)
        assert (tmp_path / "store" / "u0").exists()

    def test_a_step_may_write_below_its_input_where_it_says_so(self, tmp_path: Path) -> None:
        run(tmp_path / "in")
        _start(tmp_path / "in" / "ple", inputs=(tmp_path / "in",), below_input=True)
        with pytest.raises(InputError, match="would share"):
            _start(tmp_path / "in", inputs=(tmp_path / "in",), below_input=True)

    def test_a_directory_beside_the_input_is_accepted(self, tmp_path: Path) -> None:
        run(tmp_path / "in")
        _start(tmp_path / "in-2", inputs=(tmp_path / "in",))


class TestOtherSteps:
    @pytest.mark.parametrize("when", ["unfinished", "finished"])
    def test_what_another_step_wrote_stays(self, tmp_path: Path, when: str) -> None:
        broken_off(tmp_path) if when == "unfinished" else run(tmp_path)
        before = content(tmp_path)
        with (
            pytest.raises(InputError, match="was written by q38 step"),
            Job(tmp_path, "other", IDENTITY, fresh=True),
        ):
            pass
        assert content(tmp_path) == before

    def test_files_that_another_program_lists_stay(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"precious")
        (tmp_path / MANIFEST).write_text('{"files": {"a": {"bytes": 8, "sha256": ""}}, "step": "step"}')
        with pytest.raises(InputError, match="was not written by this version of q38"):
            run(tmp_path, fresh=True)
        assert (tmp_path / "a").exists()


class TestOutside:
    """A manifest or a journal can be made by anyone."""

    NAMES = ("../precious", "/precious", "sub/../../precious", "")

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("use", [*USES, "read"])
    def test_a_manifest_that_names_a_file_outside_is_refused(
        self, tmp_path: Path, name: str, use: str
    ) -> None:
        out = tmp_path / "out"
        run(out)
        (tmp_path / "precious").write_bytes(b"content")
        manifest = json.loads((out / MANIFEST).read_text())
        manifest["files"][name] = manifest["files"]["u0"]
        (out / MANIFEST).write_text(json.dumps(manifest))
        before = content(tmp_path)
        with pytest.raises(InputError, match="outside the directory"):
            (USES | {"read": read_manifest})[use](out)
        assert [name for name in content(tmp_path) if not name.startswith("out/.q38")] == before

    @pytest.mark.parametrize("use", USES)
    def test_a_journal_that_names_a_file_outside_is_refused(self, tmp_path: Path, use: str) -> None:
        out = tmp_path / "out"
        broken_off(out)
        (tmp_path / "precious").write_bytes(b"content")
        line = {"unit": "x", "files": {"../precious": {"bytes": 7, "sha256": "h"}}, "result": None}
        with journal(out).open("a") as f:
            f.write(json.dumps(line) + "\n")
        with pytest.raises(InputError, match="outside the directory"):
            (USES | {"read": read_manifest})[use](out)
        assert (tmp_path / "precious").exists() and (out / "u0").exists()

    def test_a_link_that_leaves_the_directory_is_not_followed(self, tmp_path: Path) -> None:
        out = tmp_path / "out"
        with Job(out, "step", IDENTITY) as job:
            (out / "sub").mkdir()
            (out / "sub" / "w").write_bytes(b"x")
            job.commit("one", files={"sub/w": FileRecord(1, "h")})
            job.finish()
        (out / "sub").rename(tmp_path / "away")
        (out / "sub").symlink_to("../away")
        with pytest.raises(InputError, match="a link that leaves the directory"):
            run(out, fresh=True)
        assert (tmp_path / "away" / "w").exists()


class TestKilled:
    @pytest.mark.parametrize("when", ["unfinished", "finished"])
    @pytest.mark.parametrize("after", range(6))
    def test_a_kill_while_old_files_go_leaves_none_unrecorded(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, after: int
    ) -> None:
        broken_off(tmp_path) if when == "unfinished" else run(tmp_path)
        unlink, left = Path.unlink, iter(range(after))

        def dying(path: Path, missing_ok: bool = False) -> None:
            if next(left, None) is None:
                raise Killed
            unlink(path, missing_ok)

        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr(Path, "unlink", dying)
            run(tmp_path, 0, identity={"other": 1}, fresh=True)
            raise Killed  # fewer files than `after`
        run(tmp_path, 0, identity={"other": 1}, fresh=True)
        # The unit in hand when the first run was killed was not recorded; the second kind of kill may not add to it.
        assert content(tmp_path) == [MANIFEST] + ["u2"] * (when == "unfinished")

    def test_units_without_files_do_not_survive_into_another_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with Job(tmp_path, "step", IDENTITY) as job:
            job.commit("measured", result=1)
        removed: list[str] = []
        unlink = Path.unlink

        def watched(path: Path, missing_ok: bool = False) -> None:
            removed.append(path.name)
            unlink(path, missing_ok)

        monkeypatch.setattr(Path, "unlink", watched)
        with Job(tmp_path, "step", {"other": 1}, fresh=True) as job:
            assert job.done == {}
        # The other way round a kill in between would leave the units of one identity under the next.
        assert removed.index("journal.jsonl") < removed.index("job.json")


class TestDamaged:
    @pytest.mark.parametrize("text", ["", '{"schema": "q38.mani', "[]"])
    def test_a_damaged_manifest_is_repaired_by_fresh_as_the_refusal_says(
        self, tmp_path: Path, text: str
    ) -> None:
        run(tmp_path)
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(InputError, match=r"not valid JSON|not a JSON object") as caught:
            run(tmp_path)
        assert caught.value.remedy == "start over with --fresh"
        assert run(tmp_path, fresh=True) == ["u0", "u1", "u2"]

    def test_fresh_says_that_files_of_a_damaged_manifest_stay(self, tmp_path: Path) -> None:
        run(tmp_path)
        (tmp_path / MANIFEST).write_text("{")
        heard = Heard()
        _start(tmp_path, fresh=True, progress=heard)
        assert (tmp_path / "u2").exists()
        assert len(heard.said) == 1 and heard.said[0].startswith(f"{tmp_path / MANIFEST}: not valid JSON")

    def test_a_damaged_manifest_of_an_input_does_not_advise_fresh(self, tmp_path: Path) -> None:
        run(tmp_path)
        (tmp_path / MANIFEST).write_text("{")
        with pytest.raises(InputError, match="not valid JSON") as caught:
            read_manifest(tmp_path)
        assert "--fresh" not in str(caught.value)

    @pytest.mark.parametrize("damage", [MANIFEST, ".q38/journal.jsonl"])
    def test_what_a_damaged_record_lists_is_not_discarded_by_halves(
        self, tmp_path: Path, damage: str
    ) -> None:
        broken_off(tmp_path)
        (tmp_path / damage).write_text("{\n")
        before = content(tmp_path)
        with pytest.raises(InputError, match="which files q38 wrote is not known"):
            discard(tmp_path)
        assert content(tmp_path) == before

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_a_manifest_that_may_not_be_read_is_not_damaged(self, tmp_path: Path) -> None:
        run(tmp_path)
        (tmp_path / MANIFEST).chmod(0)
        with pytest.raises(InputError, match="cannot be read"):
            run(tmp_path, fresh=True)
