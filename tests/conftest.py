"""Fixtures that several test folders share: the tiny model in each of its states, built once per run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from q38.base.settings import calm_threads, export

calm_threads()  # before any test imports torch

if not Path("/dev/nvidiactl").exists():
    # Triton reads it on its first import, which any test may cause; kernels then run in its interpreter.
    export({"TRITON_INTERPRET": "1"})

# A loaded machine is slow, not wrong.
settings.register_profile("q38", deadline=None)
settings.load_profile("q38")

if TYPE_CHECKING:
    from q38.serving.launch import Server


@pytest.fixture(scope="session", autouse=True)
def state_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """PID files and logs of servers that tests start, apart from the user's own."""
    directory = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("Q38_STATE_DIR", str(directory))
        yield directory


@pytest.fixture(scope="session")
def tiny_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained tiny model in the bf16 release layout. Read only: copy before you break it."""
    from q38.synth.tiny import synth_tiny

    out = tmp_path_factory.mktemp("tiny") / "source"
    synth_tiny(out)
    return out


@pytest.fixture(scope="session")
def tiny_source_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in the FP8 release layout."""
    from q38.synth.tiny import synth_tiny

    out = tmp_path_factory.mktemp("tiny_fp8") / "source"
    synth_tiny(out, fp8=True)
    return out


@pytest.fixture(scope="session")
def tiny_ple(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model's n-gram table, split off (ple.json beside its .bin)."""
    from q38.ple.split import split_ple

    out = tmp_path_factory.mktemp("tiny_ple") / "ple"
    split_ple(tiny_source, out)
    return out


@pytest.fixture(scope="session")
def tiny_packed(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model packed by plain rounding, which takes a second. No n-gram table in or beside it."""
    from q38.recipe.schema import load_recipe
    from tests.measure.packed import pack_model

    out = tmp_path_factory.mktemp("tiny_packed") / "inner" / "model"
    pack_model(tiny_source, out, load_recipe(Path(__file__).parent / "data" / "fast.yaml"))
    return out


@pytest.fixture(scope="session")
def tiny_quantized(tiny_source: Path, tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model quantized by AutoRound with the test recipe (few iterations)."""
    from q38.quantize.driver import quantize
    from q38.recipe.schema import load_recipe

    out = tmp_path_factory.mktemp("tiny_quantized") / "model"
    quantize(tiny_source, out, load_recipe(Path(__file__).parent / "data" / "fast.yaml"), ple=tiny_ple)
    return out


@pytest.fixture(scope="session")
def tiny_server(tiny_quantized: Path, tiny_ple: Path) -> Iterator[Server]:
    """A real server of the quantized tiny model, shared: leave it running and idle."""
    from q38.serving.launch import running_server

    with running_server(tiny_quantized, ple=tiny_ple, name="tiny") as server:
        yield server
