"""The tiny model packed by plain rounding, and copies of it that a test may break."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from q38.recipe.schema import load_recipe
from tests.measure.packed import copy_model, pack_model


@pytest.fixture(scope="session")
def packed(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: use `broken` to change something."""
    out = tmp_path_factory.mktemp("packed") / "model"
    pack_model(tiny_source, out, load_recipe(Path(__file__).parents[1] / "data" / "fast.yaml"))
    return out


@pytest.fixture
def broken(packed: Path, tmp_path: Path) -> Callable[..., Path]:
    """A fresh copy of `packed`; without its manifest unless asked, so that the content has to tell."""
    return lambda *, manifest=False: copy_model(packed, tmp_path / "broken" / "model", manifest=manifest)
