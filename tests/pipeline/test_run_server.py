"""A run whose server takes the routing profile and the oracle, as on a machine that cannot hold the model whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from q38.checkpoint.index import read_json
from q38.pipeline.releasing import from_run
from q38.pipeline.run import run
from q38.release.build import build
from q38.release.check import check
from q38.residency.profile import load
from tests.measure.pages import check_page
from tests.sglang_ext.conftest import missing

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]  # a loaded machine is slow, not wrong
DATA = Path(__file__).parents[1] / "data"
STEPS = [
    "inspect", "split-ple", "quantize", "requant-int8", "verify", "serve-measuring", "build-placement", "oracle-save", "serve",
    "bench", "oracle-check",
]  # fmt: skip


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real SGLang on the CPU, and experts by plain rounding, which takes a second."""
    sections = yaml.safe_load((DATA / "fast.yaml").read_text())
    sections["quantize"]["experts"] = {"method": "rtn"}
    sections["placement"]["engine"] = "sglang"
    sections["oracle"] = {"engine": "sglang", "prompts": str(DATA / "oracle.json")}
    sections["serve"] = {"engine": "sglang", "device": "cpu", "context": 1024}
    file = tmp_path_factory.mktemp("recipe") / "server.yaml"
    file.write_text(yaml.safe_dump(sections))
    return file


@pytest.fixture(scope="module")
def finished(recipe: Path, tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if why := missing():
        pytest.skip(why)
    work = tmp_path_factory.mktemp("run") / "work"
    assert run(recipe, work, source=tiny_source)["ran"] == STEPS
    return work


def test_both_servers_answered_and_the_second_began_with_the_profile(finished: Path) -> None:
    report = read_json(finished / "report.json")
    assert report["passed"] and report["left_out"] == []
    assert report["serve"]["engine"] == "sglang" and report["serve"]["chat"]["completion_tokens"] > 0
    assert report["oracle"]["passed"] and not report["oracle"]["layers"]["compared"]
    assert load(finished / "placement.safetensors").tokens >= 512
    assert report["placement"]["coverage"][0]["equal"] is not None
    commands = {step["step"]: step["command"] for step in report["steps"]}
    assert "placement.safetensors" in commands["serve"] and "--profile none" in commands["serve-measuring"]
    check_page((finished / "report.html").read_text())


def test_it_is_done_and_stays_done(finished: Path, recipe: Path, tiny_source: Path) -> None:
    assert run(recipe, finished, source=tiny_source)["ran"] == []


def test_a_server_is_started_again_for_the_step_that_is_redone(
    finished: Path, recipe: Path, tiny_source: Path
) -> None:
    assert run(recipe, finished, source=tiny_source, fresh_from="oracle-check")["ran"] == ["oracle-check"]


def test_a_release_holds_what_this_run_wrote(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "release"
    build(from_run(finished), out)
    assert check(out, full=True)["passed"]
    assert sorted(path.name for path in (out / "q38").iterdir()) == [
        "oracle.json",
        "placement.safetensors",
        "recipe.yaml",
    ]
    assert json.loads((out / "records" / "steps" / "serve-measuring.json").read_text())["engine"] == "sglang"
