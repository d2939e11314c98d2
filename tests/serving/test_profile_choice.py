"""Which routing profile a server starts with: checked before anything is loaded, and found where it lies with the model."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.residency.profile import Profile, save
from q38.serving.engines import ServeOptions
from q38.serving.profile_choice import choose_profile
from q38.serving.sglang_engine import launch
from q38.serving.sglang_settings import SglangSettings


def profile(file: Path, layers: int = 4, experts: int = 16) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    save(Profile(np.ones((layers, experts), np.int64), np.ones((layers, experts)), 600), file)
    return file


@pytest.fixture
def model(tiny_packed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_packed, tmp_path / "work" / "model"))


@pytest.mark.parametrize(
    ("name", "match"),
    [("absent", "no such file"), ("config.json", "."), ("other", r"4 x 15 experts, the model has 4 x 16")],
)
def test_a_given_profile_that_does_not_fit_is_refused_before_the_start(
    model: Path, tiny_ple: Path, tmp_path: Path, name: str, match: str
) -> None:
    profile(tmp_path / "other", experts=15)
    given = {
        "absent": tmp_path / "absent",
        "config.json": model / "config.json",
        "other": tmp_path / "other",
    }[name]
    settings = SglangSettings(device="cpu", context=1024, profile=given)
    with pytest.raises(InputError, match=match) as caught:
        launch(ServeOptions(model, tiny_ple, port=7, sglang=settings))
    assert str(given) in str(caught.value)


def test_the_profile_of_a_run_or_of_a_release_is_found(model: Path, tiny_ple: Path) -> None:
    checkpoint = Checkpoint.open(model)
    assert choose_profile(checkpoint, None) == (None, "routing profile: none, all experts start alike")
    beside = profile(model.parent / "placement.safetensors")
    found, line = choose_profile(checkpoint, None)
    assert found == beside and "found with the model" in line
    assert choose_profile(checkpoint, Path("none"))[0] is None
    inside = profile(model / "q38" / "placement.safetensors")
    assert choose_profile(checkpoint, None)[0] == inside
    started = launch(ServeOptions(model, tiny_ple, port=7, sglang=SglangSettings(device="cpu", context=1024)))
    assert started.figures["profile"] == str(inside)
    assert str(inside.resolve()) in started.environment["Q38_SGLANG"]
    assert f"routing profile: {inside}, found with the model" in started.plan


def test_a_profile_of_another_model_that_nobody_asked_for_is_passed_over(model: Path) -> None:
    stray = profile(model.parent / "placement.safetensors", layers=3)
    found, line = choose_profile(Checkpoint.open(model), None)
    assert found is None and str(stray) in line and "3 x 16" in line
