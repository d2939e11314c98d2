"""A model of which one block at a time holds weights, against the whole model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from q38.base.errors import InputError
from q38.hf.blocks import BlockModel
from q38.hf.hooks import qsa_shortcut
from q38.hf.load import load_model
from q38.model.names import LAYERS
from tests.hf.conftest import logits
from tests.measure.packed import copy_model, edit_tensor


def stream(model: BlockModel, ids: torch.Tensor) -> torch.Tensor:
    """Logits [B, T, V], one block after the other."""
    with torch.inference_mode(), qsa_shortcut():
        x = model.embed(ids)
        for index in range(model.shape.num_layers):
            with model.block(index) as block:
                x = block(x, ids)
        with model.head() as (mixer, matrix):
            return mixer(x) @ matrix.T


@pytest.mark.parametrize("name", ["tiny_source", "tiny_source_fp8"])
def test_a_source_gives_the_bits_of_the_whole_model(
    name: str, request: pytest.FixtureRequest, ids: torch.Tensor
) -> None:
    path = request.getfixturevalue(name)
    assert torch.equal(stream(BlockModel(path), ids), logits(load_model(path), ids))


def test_a_packed_model_gives_the_whole_models_numbers_in_float32(
    tiny_packed: Path, tiny_ple: Path, ids: torch.Tensor
) -> None:
    streamed = stream(BlockModel(tiny_packed, ple=tiny_ple, dtype=torch.float32), ids)
    whole = logits(load_model(tiny_packed, ple=tiny_ple, dtype=torch.float32), ids)
    assert torch.allclose(streamed, whole, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(streamed, whole.roll(1, dims=1), rtol=1e-1, atol=1e-1)


def test_outside_its_block_no_weight_is_held(tiny_source: Path, ids: torch.Tensor) -> None:
    model = BlockModel(tiny_source)
    with torch.inference_mode():
        x = model.embed(ids)
        for index in (0, 1):
            with model.block(index) as block:
                assert not any(p.is_meta for p in model._blocks[index].parameters())
                block(x, ids)
            assert all(p.is_meta for layer in model._blocks for p in layer.parameters())


def test_the_stated_bytes_are_those_of_the_largest_block(tiny_source: Path) -> None:
    model = BlockModel(tiny_source)
    held = []
    for index in range(model.shape.num_layers):
        with model.block(index):
            held.append(sum(p.numel() * p.element_size() for p in model._blocks[index].parameters()))
    assert model.block_bytes == max(held)
    with model.head() as (_, matrix):
        assert model.head_bytes == matrix.numel() * matrix.element_size()


def test_the_other_experts_are_used_inside_and_put_back(tiny_source: Path) -> None:
    model = BlockModel(tiny_source)
    before = model._model.config._experts_implementation
    with model.other_experts() as change:
        assert model._model.config._experts_implementation != before
        assert change == "grouped_mm -> eager"
    assert model._model.config._experts_implementation == before


def lose(suffix: str) -> Callable[[Path], None]:
    return lambda model: edit_tensor(model, f"{LAYERS}.{suffix}", lambda t: None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose("2.mlp.experts.5.up_proj.qweight"), r"experts\.5\.up_proj"),
        (lose("2.mlp.experts.5.up_proj.scales"), r"experts\.5\.up_proj\.scales is missing"),
        (lose("3.self_attn.q_norm.weight"), r"q_norm\.weight is missing"),
        (
            lambda model: edit_tensor(model, f"{LAYERS}.1.mlp.gate.weight", lambda t: t[:3].clone()),
            r"mlp\.gate\.weight has shape \[3, 256\], the model wants \[16, 256\]",
        ),
    ],
)
def test_a_damaged_block_is_refused_when_the_model_is_opened(
    damage: Callable[[Path], None], message: str, tiny_packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_packed, tmp_path / "model")
    damage(model)
    with pytest.raises(InputError, match=message):
        BlockModel(model, ple=tiny_ple)


def test_an_expert_of_the_fp8_release_without_its_scales_is_refused(
    tiny_source_fp8: Path, tmp_path: Path
) -> None:
    model = copy_model(tiny_source_fp8, tmp_path / "model")
    edit_tensor(model, f"{LAYERS}.0.mlp.experts.2.down_proj.weight_scale_inv", lambda t: None)
    with pytest.raises(InputError, match=r"down_proj\.weight_scale_inv is missing"):
        BlockModel(model)
