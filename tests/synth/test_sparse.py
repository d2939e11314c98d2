"""Sparse checkpoints: true headers at any size, a few real values, next to no disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import q38.cli.synth  # noqa: F401 (registers the verb)
from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.cli.app import app
from q38.model.expected import Layout
from q38.synth.sparse import plan_sparse, synth_sparse


@pytest.fixture(scope="module")
def config(tiny_source: Path) -> Path:
    return tiny_source / "config.json"


@pytest.mark.parametrize("layout", ["bf16", "fp8", "quantized"])
def test_each_layout_opens_as_a_checkpoint(layout: Layout, config: Path, tmp_path: Path) -> None:
    result = synth_sparse(tmp_path / "s", config, layout=layout, recipe="tiny", shard_bytes=10**6)
    checkpoint = Checkpoint.open(tmp_path / "s")
    assert len(checkpoint.tensors) == result["tensors"]
    assert (
        checkpoint.nbytes
        == result["tensor_bytes"]
        == plan_sparse(config, layout=layout, recipe="tiny")["tensor_bytes"]
    )


def test_the_constants_of_the_ngram_table_are_true(config: Path, tiny_source: Path, tmp_path: Path) -> None:
    synth_sparse(tmp_path / "s", config, layout="bf16")
    sparse, real = Checkpoint.open(tmp_path / "s"), Checkpoint.open(tiny_source)
    names = [n for n in real.tensors if ".ple_embedding." in n and ".ngram_embedding." not in n]
    assert len(names) == 3
    for name in names:
        assert sparse.read(name).tolist() == real.read(name).tolist()


def test_the_same_command_twice_writes_nothing_new(config: Path, tmp_path: Path) -> None:
    first = synth_sparse(tmp_path / "s", config, layout="bf16")
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").iterdir()}
    assert synth_sparse(tmp_path / "s", config, layout="bf16") == first
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "s").iterdir()} == before


def test_a_quantized_layout_needs_a_recipe(config: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="recipe"):
        synth_sparse(tmp_path / "s", config, layout="quantized")
    assert not (tmp_path / "s").exists()


def test_the_real_size_takes_little_disk(tmp_path: Path) -> None:
    result = synth_sparse(tmp_path / "s", layout="bf16")
    assert result["tensors"] == 1_658
    assert result["disk_bytes"] < result["tensor_bytes"] / 1000
    index = json.loads((tmp_path / "s" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == result["tensor_bytes"]


def test_the_command_writes_a_checkpoint_and_its_dry_run_nothing(config: Path, tmp_path: Path) -> None:
    run = CliRunner()
    arguments = ["synth", "sparse", str(tmp_path / "s"), "--layout", "quantized", "--config", str(config)]
    arguments += ["--recipe", "tiny", "--json"]
    planned = run.invoke(app, [*arguments, "--dry-run"])
    assert not list(tmp_path.iterdir())
    written = run.invoke(app, arguments)
    assert written.exit_code == planned.exit_code == 0, written.output
    assert json.loads(planned.stdout)["tensors"] == json.loads(written.stdout)["tensors"]
    assert len(Checkpoint.open(tmp_path / "s").tensors) == json.loads(written.stdout)["tensors"]
