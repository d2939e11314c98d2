"""The order of a run, and what each engine of its measurements makes of the commands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError
from q38.pipeline.steps import Step, Workdir, left_out, plan_steps
from q38.recipe.schema import Recipe, load_recipe, parse_recipe

WORK = Workdir(Path("work"))
SGLANG = {"engine": "sglang"}


def recipe(**sections: Any) -> Recipe:
    return parse_recipe({"schema": "q38.recipe/1", "name": "t", "source": {"path": "src"}, **sections})


def steps(**sections: Any) -> dict[str, Step]:
    return {step.name: step for step in plan_steps(recipe(**sections), Path("src"), WORK)}


def words(step: Step) -> str:
    return " ".join(step.args)


def test_by_default_everything_is_measured_in_processes_of_its_own() -> None:
    found = steps()
    assert list(found)[4:] == ["build-placement", "verify", "oracle-save", "serve", "bench", "oracle-check"]
    assert [name for name, step in found.items() if step.server] == ["bench"]
    assert "--profile" not in words(found["serve"])  # engine auto may be transformers, which takes none


def test_what_the_server_measures_comes_between_a_first_server_and_the_one_with_the_profile() -> None:
    found = steps(placement=SGLANG, oracle=SGLANG, serve={**SGLANG, "context": 4096, "ram": "28GiB"})
    assert list(found)[4:] == [
        "verify", "serve-measuring", "build-placement", "oracle-save", "serve", "bench", "oracle-check",
    ]  # fmt: skip
    first, last = found["serve-measuring"], found["serve"]
    assert "--context 4096 --ram 28GiB --profile none" in words(first)
    assert "--context 4096 --ram 28GiB --profile work/placement.safetensors" in words(last)
    assert WORK.placement in last.reads
    servers = {name: step.server for name, step in found.items() if step.server}
    assert servers == {
        "build-placement": "serve-measuring", "oracle-save": "serve-measuring", "bench": "serve", "oracle-check": "serve",
    }  # fmt: skip
    assert all("--server URL" in words(found[name]) for name in servers if name != "bench")
    assert found["oracle-save"].writes == (WORK.oracle,)  # a server's blocks cannot be fed


def test_what_the_recipe_leaves_out_is_no_step_and_is_told() -> None:
    none = {"engine": "none"}
    found = steps(placement=none, oracle=none, serve=SGLANG)
    assert list(found)[4:] == ["verify", "serve", "bench"]
    assert "--profile none" in words(found["serve"])
    told = left_out(recipe(placement=none, oracle=none))
    assert [line.partition(" (")[2].partition(")")[0] for line in told] == [
        "placement.engine: none",
        "oracle.engine: none",
    ]
    assert left_out(recipe()) == []


@pytest.mark.parametrize(
    ("sections", "match"),
    [
        ({"placement": SGLANG}, "placement.engine: sglang.*set serve.engine"),
        ({"oracle": SGLANG, "serve": {"engine": "transformers"}}, "oracle.engine: sglang.*set serve.engine"),
        ({"serve": {"context": 4096}}, "context: only engine sglang"),
        ({"serve": {**SGLANG, "ram": "much"}}, "ram: 'much' is not a size"),
    ],
)
def test_a_server_that_the_recipe_does_not_start_is_refused(sections: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        recipe(**sections)


@pytest.mark.parametrize("name", ["quality-24gb", "quality-24gb-mtp", "fast"])
def test_recipes_for_the_real_model_never_hold_it_whole_in_memory(name: str) -> None:
    found = load_recipe(name)
    assert (found.placement.engine, found.oracle.engine, found.serve.engine) == ("sglang",) * 3
