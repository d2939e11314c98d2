"""The packed checkpoint of random weights: whole, readable by the loaders, with routers of the published skew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import q38.cli.synth  # noqa: F401 (registers the verb)
from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.cli.app import app
from q38.model.shape import ModelShape
from q38.ple.reader import PleTable
from q38.recipe.schema import load_recipe
from q38.residency import placement, profile
from q38.residency.heat import hottest
from q38.residency.shards import expert_layout, plan_reads
from q38.residency.synthetic import selection_rates
from q38.synth.full import PROFILE, plan_full, synth_full


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("full") / "model"
    synth_full(out, shard_bytes=2_000_000, threads=2)
    return out


def test_it_holds_what_a_finished_checkpoint_holds(full: Path) -> None:
    from q38.model.expected import quantized_tensors
    from q38.recipe.bits import plan_bits

    checkpoint = Checkpoint.open(full)
    config = json.loads((full / "config.json").read_text())
    bits = plan_bits(config, load_recipe("quality-24gb"))
    expected = {t.name: t.shape for t in quantized_tensors(config, bits, 128, mtp=False, vision=False)}
    assert {name: info.shape for name, info in checkpoint.tensors.items()} == expected
    assert len({info.file for info in checkpoint.tensors.values()}) > 2
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= {
        f.name for f in full.iterdir()
    }


def test_the_expert_loader_takes_it(full: Path) -> None:
    checkpoint = Checkpoint.open(full)
    layout = expert_layout(checkpoint)
    assert plan_reads(checkpoint, layout).scale_dtype == "F16"
    zeros = next(n for n in checkpoint.tensors if ".experts.0." in n and n.endswith("qzeros"))
    assert (checkpoint.read(zeros) == 0x55555555).all()


def test_weights_are_centred_and_of_sensible_size(full: Path) -> None:
    from q38.kernels.reference import dequantize_words

    checkpoint = Checkpoint.open(full)
    for name, width in (("mlp.experts.3.up_proj", 2), ("linear_attn.out_proj", 8)):
        prefix = f"model.language_model.layers.0.{name}"
        words, scales = checkpoint.read(prefix + ".qweight"), checkpoint.read(prefix + ".scales")
        weight = dequantize_words(words, scales, width, torch.float32)
        norm = weight.norm(dim=0).mean().item()
        assert norm == pytest.approx(1, abs=0.1)
        assert abs(weight.mean().item()) < 0.1 / weight.shape[0] ** 0.5
    for name, info in checkpoint.tensors.items():
        if info.dtype in ("BF16", "F16"):
            assert torch.isfinite(checkpoint.read(name)).all(), name


def test_the_table_is_a_hole_that_reads_as_zeros(full: Path) -> None:
    table = PleTable.open(full / "ple")
    assert table.dim == 512 // 16
    assert not table.rows(torch.tensor([0, table.num_rows - 1])).any()
    assert (full / "ple" / "ple.f8_e4m3.bin").stat().st_blocks == 0


def test_the_published_share_of_selections_falls_to_the_hottest_experts() -> None:
    rates = selection_rates(layers=2, experts=512, top_k=10)
    held = hottest(rates, np.array([184, 184]))
    assert rates.sum(axis=1) == pytest.approx([10, 10])
    assert (rates * held).sum() / rates.sum() == pytest.approx(0.843, abs=0.01)


def test_a_router_chooses_as_its_profile_says() -> None:
    """Random activations through a router of the real size, against the rates it was made from."""
    from q38.data import data_path
    from q38.model.expected import Expected
    from q38.model.names import LAYERS
    from q38.synth.packed_weights import PackedWeights

    config = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())
    shape = ModelShape.from_config(config)
    weights = PackedWeights(shape, {}, 128)
    spec = Expected(f"{LAYERS}.5.mlp.gate.weight", (shape.num_experts, shape.hidden_size))
    gate = torch.frombuffer(bytearray(b"".join(weights.chunks(spec))), dtype=torch.bfloat16)
    x = torch.randn(1000, shape.hidden_size, generator=torch.Generator().manual_seed(0))
    chosen = (x @ gate.view(spec.shape).float().T).topk(shape.num_experts_per_tok).indices
    counts = np.bincount(chosen.reshape(-1).numpy(), minlength=shape.num_experts)
    hot = np.argsort(-weights.rates[5])[:184]
    assert counts[hot].sum() / counts.sum() == pytest.approx(0.843, abs=0.03)


def test_the_profile_fits_the_model(full: Path) -> None:
    config = json.loads((full / "config.json").read_text())
    shape = ModelShape.from_config(config)
    heat = placement.heat(profile.load(full / PROFILE))
    assert heat.shape == (shape.num_layers, shape.num_experts)


def test_the_same_call_gives_the_same_bytes_whatever_the_threads(full: Path, tmp_path: Path) -> None:
    synth_full(tmp_path / "again", shard_bytes=2_000_000, threads=1)
    names = sorted(f.name for f in full.glob("model*"))
    assert names == sorted(f.name for f in (tmp_path / "again").glob("model*"))
    for name in names:
        assert (full / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


def test_other_options_need_a_fresh_start(full: Path) -> None:
    with pytest.raises(InputError, match="seed"):
        synth_full(full, shard_bytes=2_000_000, seed=1)


def test_the_real_size_is_the_published_one() -> None:
    assert plan_full(gpu_scale=True, recipe="quality-24gb") == {
        "tensors": 222_856, "tensor_bytes": 38_755_352_600, "table_bytes": 51_200_245_760
    }  # fmt: skip


def test_the_dry_run_of_the_command_writes_nothing(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["synth", "full", str(tmp_path / "m"), "--dry-run", "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["tensors"] > 0
    assert not list(tmp_path.iterdir())
