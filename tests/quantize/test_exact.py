"""The written files against AutoRound's own fake-quantized weights, weight by weight and by KL divergence."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix, dequantize, pack, unpack
from q38.hf.hooks import NgramLookup
from q38.hf.load import load_model
from q38.quantize.plan import Plan
from tests.quantize.conftest import Recorded


def packed(checkpoint: Checkpoint, module: str) -> PackedMatrix:
    return PackedMatrix(*(checkpoint.read(f"{module}.{field}") for field in PackedMatrix._fields))


def test_every_packed_matrix_was_recorded(plan: Plan, recorded: Recorded) -> None:
    assert set(recorded.weights) == {m for shard in plan.shards for m in shard.packed}


@pytest.mark.parametrize("bits", [2, 8])
def test_the_dequantizer_reproduces_autorounds_weights_bit_for_bit(
    bits: int, plan: Plan, recorded: Recorded
) -> None:
    checkpoint = Checkpoint.open(recorded.out)
    names = [name for name in recorded.weights if plan.bits[name] == bits]
    assert names
    for name in names:
        weight = dequantize(*packed(checkpoint, name), bits)
        assert torch.equal(weight.to(torch.bfloat16), recorded.weights[name].to(torch.bfloat16)), name


def test_repacking_unpacked_words_gives_the_same_words(plan: Plan, recorded: Recorded) -> None:
    checkpoint = Checkpoint.open(recorded.out)
    for name in recorded.weights:
        words, bits = checkpoint.read(f"{name}.qweight"), plan.bits[name]
        assert torch.equal(pack(unpack(words, bits, words.shape[0] * 32 // bits), bits), words), name


def test_the_same_run_again_writes_the_same_bytes(recorded: Recorded, tiny_quantized: Path) -> None:
    for file in sorted(tiny_quantized.glob("*.safetensors")):
        assert file.read_bytes() == (recorded.out / file.name).read_bytes(), file.name


def test_the_packed_model_diverges_from_the_source_as_the_fake_quantized_one_does(
    recorded: Recorded, tiny_source: Path, tiny_ple: Path
) -> None:
    """To 1e-3 relative, in float32: in bfloat16 AutoRound's modules round their weights twice."""
    ids = torch.randint(10, 1000, (4, 64), generator=torch.Generator().manual_seed(5))
    packed_model = in_float32(load_model(recorded.out, ple=tiny_ple))
    fake = copy.deepcopy(packed_model)
    for name, weight in recorded.weights.items():
        assert hasattr(packed_model.get_submodule(name), "qweight")
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.to(torch.float32)
        fake.set_submodule(name, linear)
    source = load_model(tiny_source, ple=tiny_ple, dtype=torch.float32)
    with torch.no_grad():
        reference, ours, theirs = (
            model(input_ids=ids).logits.double().log_softmax(-1) for model in (source, packed_model, fake)
        )
    kl = [(reference.exp() * (reference - other)).sum(-1).mean().item() for other in (ours, theirs)]
    assert kl[0] > 1e-5
    assert kl[0] == pytest.approx(kl[1], rel=1e-3)


def in_float32(model: Any) -> Any:
    """A packed model with float32 activations, its matrices still packed."""
    torch.nn.Module.float(model)  # transformers' own method refuses quantized models
    for module in model.modules():
        if isinstance(module, NgramLookup):
            module.dtype = torch.float32
    return model
