from __future__ import annotations

from pathlib import Path

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.source import SourceWeights

LAYER = "model.language_model.layers.0"


def test_rows_of_a_fused_expert_are_those_of_the_fused_tensor(tiny_source: Path) -> None:
    checkpoint = Checkpoint.open(tiny_source)
    fused = checkpoint.read(f"{LAYER}.mlp.experts.gate_up_proj").float()  # [E, 2 I, H]
    down = checkpoint.read(f"{LAYER}.mlp.experts.down_proj").float()
    weights, middle = SourceWeights(checkpoint), fused.shape[1] // 2
    prefix = f"{LAYER}.mlp.experts.5"
    assert torch.equal(weights.rows(f"{prefix}.gate_proj", 3, 40), fused[5, 3:40])
    assert torch.equal(weights.rows(f"{prefix}.up_proj", 0, middle), fused[5, middle:])
    assert torch.equal(weights.rows(f"{prefix}.down_proj", 10, 20), down[5, 10:20])
    assert weights.shape(f"{prefix}.up_proj") == (middle, fused.shape[2])


def test_rows_of_an_fp8_expert_carry_their_block_scales(tiny_source_fp8: Path) -> None:
    checkpoint = Checkpoint.open(tiny_source_fp8)
    module = f"{LAYER}.mlp.experts.5.up_proj"
    codes, scales = checkpoint.read(f"{module}.weight"), checkpoint.read(f"{module}.weight_scale_inv")
    whole = dequantize_blocks(codes, scales).float()
    assert torch.equal(SourceWeights(checkpoint).rows(module, 7, 100), whole[7:100])


@pytest.mark.parametrize("module", [f"{LAYER}.mlp.experts.999.up_proj", f"{LAYER}.no_such_module"])
def test_an_absent_matrix_has_no_shape_and_is_refused(tiny_source: Path, module: str) -> None:
    weights = SourceWeights(Checkpoint.open(tiny_source))
    assert weights.shape(module) is None
    with pytest.raises(InputError, match="is missing"):
        weights.rows(module, 0, 1)
