"""Releases of the tiny model, small enough to make many of."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from q38.release.build import build
from q38.release.collect import from_model
from tests.measure.packed import copy_model


@pytest.fixture(scope="session")
def packed(tiny_packed: Path, tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The packed tiny model with its n-gram table inside. Read only: releases are links to it."""
    out = tmp_path_factory.mktemp("packed") / "tiny-packed"
    copy_model(tiny_packed, out)
    shutil.copytree(tiny_ple, out / "ple")
    return out


@pytest.fixture(scope="session")
def sealed(packed: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A release of it, of copies. Read only: copy before you break it."""
    out = tmp_path_factory.mktemp("sealed") / "release"
    build(from_model(packed), out, copy=True)
    return out


@pytest.fixture
def release(sealed: Path, tmp_path: Path) -> Path:
    """A copy of the release, to break."""
    return Path(shutil.copytree(sealed, tmp_path / "release"))
