"""The tiny model by plain rounding, and re-packed: both once for all tests of this folder. Read only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from q38.quantize.driver import quantize
from q38.quantize.requant_int8 import requant_int8
from tests.quantize.requant.common import recipe


@pytest.fixture(scope="session")
def model(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rtn") / "model"
    quantize(tiny_source, out, recipe())
    return out


@pytest.fixture(scope="session")
def result(
    model: Path, tiny_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("int8") / "model"
    return out, requant_int8(model, out, source=tiny_source, recipe=recipe())
