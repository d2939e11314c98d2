"""run.json: what counts as done, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError
from q38.checkpoint.writer import write_json
from q38.pipeline.fingerprint import fingerprint_outputs
from q38.pipeline.setup import prepare
from q38.pipeline.state import Record, RunState, first_touched, lock, refuse_changes, refuse_stale
from q38.pipeline.steps import Step, Workdir, plan_steps
from q38.recipe.schema import Recipe, parse_recipe


def _recipe(**sections: Any) -> Recipe:
    base = {"schema": "q38.recipe/1", "name": "t", "source": {"synth": "tiny"}}
    return parse_recipe({**base, **sections})


def _record(name: str, **changes: Any) -> Record:
    fields: dict[str, Any] = {
        "ok": True, "command": "c", "identity": {"command": "c"}, "started": "", "seconds": 1.0, "bytes_in": 0, "bytes_out": 0,
        "peak_memory": 0, "exit_code": 0,
    }  # fmt: skip
    return Record(name, **{**fields, **changes})


@pytest.fixture
def work(tmp_path: Path) -> Workdir:
    return Workdir(tmp_path / "run")


@pytest.fixture
def order(work: Workdir) -> list[Step]:
    return plan_steps(_recipe(), None, work)


def test_a_state_comes_back_as_it_was_saved(work: Workdir) -> None:
    state = RunState.begin(_recipe().to_dict(), {"config.json": "ab"})
    state.steps["inspect"] = _record("inspect", outputs={"x": "y"})
    work.root.mkdir()
    state.save(work)
    assert RunState.load(work) == state


def test_an_absent_or_empty_directory_has_no_state(work: Workdir) -> None:
    assert RunState.load(work) is None
    work.root.mkdir()
    assert RunState.load(work) is None


def test_a_directory_with_other_files_is_refused(work: Workdir) -> None:
    work.root.mkdir()
    (work.root / "thesis.tex").write_text("x")
    with pytest.raises(InputError, match="files that q38 run did not write"):
        RunState.load(work)


def test_a_run_file_of_another_schema_is_refused(work: Workdir) -> None:
    work.root.mkdir()
    write_json(work.state, {"schema": "q38.run/0"})
    with pytest.raises(InputError, match=r"q38\.run/1"):
        RunState.load(work)


def test_a_changed_recipe_names_the_key_and_the_step_to_redo(work: Workdir, order: list[Step]) -> None:
    state = RunState.begin(_recipe(bench={"repeats": 2}).to_dict(), {})
    with pytest.raises(InputError, match=r"bench\.repeats \(2, now 5\).*--fresh-from bench"):
        refuse_changes(state, _recipe(bench={"repeats": 5}).to_dict(), {}, order, work)


def test_a_changed_source_names_the_file(work: Workdir, order: list[Step]) -> None:
    state = RunState.begin({}, {"config.json": "aa", "model.safetensors": "bb"})
    with pytest.raises(InputError, match=r"model\.safetensors"):
        refuse_changes(state, {}, {"config.json": "aa", "model.safetensors": "cc"}, order, work)


def test_an_unchanged_recipe_and_source_pass(work: Workdir, order: list[Step]) -> None:
    recipe = _recipe().to_dict()
    refuse_changes(RunState.begin(recipe, {"a": "b"}), recipe, {"a": "b"}, order, work)


@pytest.mark.parametrize(
    ("sections", "step"),
    [
        ({"name": "other"}, "quantize"),
        ({"ple": {"dtype": "source"}}, "split-ple"),
        ({"requant_int8": {"groups": []}}, "requant-int8"),
        ({"verify": {"tokens": 512}, "placement": {"tokens": 512}}, "build-placement"),
        ({"serve": {"question": "?"}}, "serve"),
    ],
)
def test_a_recipe_change_touches_the_first_step_that_uses_the_section(
    sections: dict[str, Any], step: str, order: list[Step]
) -> None:
    assert first_touched(_recipe().to_dict(), _recipe(**sections).to_dict(), order) == step


def test_every_recipe_section_belongs_to_a_step(order: list[Step]) -> None:
    used = {section for step in order for section in step.sections}
    assert used == set(_recipe().to_dict()) - {"schema"}


def _finished(work: Workdir) -> Record:
    work.ple.mkdir(parents=True)
    (work.ple / "ple.bin").write_bytes(b"rows")
    return _record("split-ple", outputs=fingerprint_outputs((work.ple,), work.root))


def test_a_finished_step_with_its_outputs_untouched_is_not_stale(work: Workdir) -> None:
    record = _finished(work)
    refuse_stale(record, record.identity, work)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_a_damaged_output_is_named_with_the_step_to_redo(work: Workdir, damage: str) -> None:
    record = _finished(work)
    file = work.ple / "ple.bin"
    if damage == "remove":
        file.unlink()
    else:
        file.write_bytes(b"rowt" if damage == "flip" else b"row")
    with pytest.raises(InputError, match=r"ple\.bin.*--fresh-from split-ple"):
        refuse_stale(record, record.identity, work)


def test_a_step_with_another_command_is_stale(work: Workdir) -> None:
    record = _finished(work)
    with pytest.raises(InputError, match=r"another command \(\"c\", now \"d\"\)"):
        refuse_stale(record, {"command": "d"}, work)


def test_dropping_a_step_drops_the_later_ones_and_their_files_alone(work: Workdir, order: list[Step]) -> None:
    work.quantized.mkdir(parents=True)
    (work.quantized / "w.safetensors").write_bytes(b"x")
    write_json(work.quantized / "MANIFEST.json", {"files": {"w.safetensors": {"bytes": 1, "sha256": "h"}}})
    write_json(work.placement, {})
    _finished(work)
    state = RunState.begin(_recipe().to_dict(), {})
    state.steps = {name: _record(name) for name in ("inspect", "split-ple", "quantize", "requant-int8")}
    state.drop_from("quantize", order, work)
    assert list(state.steps) == ["inspect", "split-ple"]
    assert not work.quantized.exists()
    assert not work.placement.exists()
    assert (work.ple / "ple.bin").exists()


def test_what_the_recipe_no_longer_makes_goes_with_the_first_step_that_does_without_it(
    work: Workdir, order: list[Step]
) -> None:
    work.root.mkdir()
    write_json(work.oracle, {})
    write_json(work.placement, {})
    before, now = _recipe().to_dict(), _recipe(oracle={"engine": "none"})
    state = RunState.begin(before, {})
    state.steps = {step.name: _record(step.name) for step in order}
    later = plan_steps(now, None, work)
    first = first_touched(before, now.to_dict(), later)
    assert first == "serve"
    state.drop_from(first, later, work)
    assert list(state.steps) == [step.name for step in order if step.name != "oracle-save"][:-3]
    assert not work.oracle.exists() and work.placement.exists()


def test_a_drop_that_was_killed_is_finished_by_the_next_run(work: Workdir) -> None:
    work.root.mkdir()
    write_json(work.placement, {})
    state = RunState.begin(_recipe().to_dict(), {})
    state.discarding = ["placement.safetensors", "model"]
    state.save(work)
    again = RunState.load(work)
    assert again is not None
    again.finish_discarding(work)
    assert not work.placement.exists()
    assert RunState.load(work).discarding == []  # type: ignore[union-attr]


def test_two_runs_cannot_share_a_directory(work: Workdir) -> None:
    with lock(work), pytest.raises(InputError, match="another q38 run is working here"), lock(work):
        pass
    with lock(work):
        pass


def test_a_path_means_the_same_wherever_the_run_lies(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("schema: q38.recipe/1\nname: t\n")
    source = tmp_path / "source"
    source.mkdir()
    setup = prepare(recipe, tmp_path / "run", source)
    assert setup.portable(tmp_path / "run" / "ple") == "WORKDIR/ple"
    assert setup.portable(source) == "SOURCE"
    assert setup.portable(f"{tmp_path}/runner") == f"{tmp_path}/runner"
    named_as_an_argument = prepare("tiny", Path("tiny"))
    assert [named_as_an_argument.portable(word) for word in ("tiny", "tiny/ple")] == ["tiny", "WORKDIR/ple"]


def test_a_recipe_without_a_source_asks_for_one(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("schema: q38.recipe/1\nname: t\n")
    with pytest.raises(InputError, match="--source"):
        prepare(recipe, tmp_path / "run")


def test_a_source_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        prepare("tiny", tmp_path / "run", tmp_path / "absent")


@pytest.mark.parametrize("inside", ["source", "ple/deeper"])
def test_a_source_where_a_step_writes_is_refused_before_anything_is_removed(
    tmp_path: Path, inside: str
) -> None:
    source = tmp_path / "run" / inside
    source.mkdir(parents=True)
    with pytest.raises(InputError, match="lies where this run writes"):
        prepare("tiny", tmp_path / "run", source)
    assert prepare("tiny", source / "run", source).source == source
