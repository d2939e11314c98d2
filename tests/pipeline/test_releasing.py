"""What a release takes from a run; the whole of it on a real run is in test_run.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from q38.base.errors import InputError
from q38.pipeline.releasing import from_run, is_run, portable
from q38.pipeline.state import RunState, lock
from q38.pipeline.steps import Workdir
from q38.recipe.schema import load_recipe

ROOTS = ((Path("/data/runs/tiny"), "WORKDIR"), (Path("/data/src"), "SOURCE"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("q38 inspect /data/runs/tiny/source --json", "q38 inspect WORKDIR/source --json"),
        ('{"model": "/data/runs/tiny"}', '{"model": "WORKDIR"}'),
        ("<code>/data/src/config.json</code>", "<code>SOURCE/config.json</code>"),
        ("/data/runs/tiny-2/x and /other/data/src/x", "/data/runs/tiny-2/x and /other/data/src/x"),
        ("/data/src.old /data/srcs", "/data/src.old /data/srcs"),
        ("--out=/data/src", "--out=SOURCE"),
    ],
)
def test_directories_of_this_machine_become_words(text: str, expected: str) -> None:
    assert portable(text, ROOTS) == expected


def test_a_relative_directory_is_replaced_only_at_the_start_of_a_path() -> None:
    roots = ((Path("tiny"), "WORKDIR"),)
    text = f"synth tiny tiny/source --log {Path('tiny').absolute()}/log"
    assert portable(text, roots) == "synth tiny WORKDIR/source --log WORKDIR/log"


def test_a_run_that_is_not_finished_is_refused_with_the_step(tmp_path: Path) -> None:
    work = _begun(tmp_path)
    assert is_run(work.root)
    with pytest.raises(InputError, match="step synth is not done"):
        from_run(work.root)


def test_a_run_that_is_going_on_is_refused(tmp_path: Path) -> None:
    work = _begun(tmp_path)
    with lock(work), pytest.raises(InputError, match="another q38 run is working here"):
        from_run(work.root)


def test_a_run_remembers_its_machine_and_every_package(tmp_path: Path) -> None:
    state = RunState.load(_begun(tmp_path))
    assert state is not None
    assert state.machine["cores"] > 0
    assert "memory_available" not in state.machine  # it would differ from one build to the next
    assert {"safetensors", "torch", "typer"} <= state.packages.keys()


def _begun(root: Path) -> Workdir:
    """A run of which no step is done."""
    work = Workdir(root / "run")
    work.root.mkdir()
    recipe = load_recipe(Path(__file__).parents[1] / "data" / "fast.yaml")
    work.recipe.write_text(yaml.safe_dump(recipe.to_dict()))
    RunState.begin(recipe.to_dict(), {}).save(work)
    return work
