"""Whole models in memory: refused before they are loaded where they do not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q38.base.errors import ResourceError
from q38.measure import host_memory, placement
from q38.measure.loading import load_for_measuring
from q38.measure.oracle import save
from q38.measure.placement import build_placement

MIB = 2**20


@pytest.fixture
def small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory for no model, and a loader that fails the test when it is reached."""
    monkeypatch.setattr(host_memory, "available_memory", lambda: MIB)
    monkeypatch.setattr("q38.measure.loading.load_model", lambda *_, **__: pytest.fail("loaded"))


@pytest.mark.usefixtures("small_machine")
def test_a_profile_is_refused_with_the_shortfall_and_the_way_through_a_server(
    packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match=r"bfloat16, 1\.0 MiB are available: .* short\. .*--server URL"):
        build_placement(packed, tmp_path / "p.safetensors", ple=tiny_ple, tokens=placement.MIN_TOKENS)
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_machine")
def test_a_reference_in_float32_is_refused_with_the_shortfall(
    packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    with pytest.raises(ResourceError, match=r"float32, 1\.0 MiB are available: .* short"):
        save(packed, tmp_path / "ref.json", ple=tiny_ple)
    assert not list(tmp_path.iterdir())


def test_the_need_is_that_of_the_dtype(packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What bfloat16 takes is too little for float32."""
    asked: list[int] = []
    monkeypatch.setattr("q38.measure.loading.require_loadable", lambda needed, **_: asked.append(needed))
    for dtype in (torch.bfloat16, torch.float32):
        load_for_measuring(packed, ple=tiny_ple, dtype=dtype)
    assert asked[1] == pytest.approx(2 * asked[0], rel=0.01)
