"""Fixtures that several test folders share: the tiny model in each of its states, built once per run."""

from __future__ import annotations

from pathlib import Path

import pytest


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
def tiny_quantized(tiny_source: Path, tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model quantized by AutoRound with the test recipe (few iterations)."""
    from q38.quantize.driver import quantize
    from q38.recipe.schema import load_recipe

    out = tmp_path_factory.mktemp("tiny_quantized") / "model"
    quantize(tiny_source, out, load_recipe(Path(__file__).parent / "data" / "fast.yaml"), ple=tiny_ple)
    return out
