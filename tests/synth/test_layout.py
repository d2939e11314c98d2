"""The FP8 layout of known weights, and the division into shards."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.checkpoint.fp8 import dequantize_blocks
from q38.synth.layout import E4M3_MAX, fp8_layout, shard_names

EXPERTS = "model.language_model.layers.0.mlp.experts"
TABLE = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def test_fused_experts_come_apart_into_gate_up_and_down() -> None:
    gate_up = torch.randn(2, 256, 384).bfloat16()  # [E, 2N, K]
    down = torch.randn(2, 384, 128).bfloat16()
    result = fp8_layout({f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down})
    assert len(result) == 2 * 3 * 2
    expected = {"gate_proj": gate_up[1, :128], "up_proj": gate_up[1, 128:], "down_proj": down[1]}
    for projection, weight in expected.items():
        codes = result[f"{EXPERTS}.1.{projection}.weight"]
        scale = result[f"{EXPERTS}.1.{projection}.weight_scale_inv"]
        assert codes.dtype == torch.float8_e4m3fn
        assert scale.dtype == torch.bfloat16
        assert scale.shape == (weight.shape[0] // 128, weight.shape[1] // 128)
        restored = dequantize_blocks(codes, scale).float()
        # 3 mantissa bits: half a step is a sixteenth of the value, plus the smallest step near zero.
        assert ((restored - weight.float()).abs() <= weight.float().abs() / 15 + 1e-4).all()


def test_each_block_has_its_own_scale() -> None:
    weight = torch.ones(1, 128, 256).bfloat16()
    weight[..., 128:] = 100
    result = fp8_layout({f"{EXPERTS}.down_proj": weight})
    scale = result[f"{EXPERTS}.0.down_proj.weight_scale_inv"].float()
    assert torch.allclose(scale, torch.tensor([[1 / E4M3_MAX, 100 / E4M3_MAX]]), rtol=0.01)


def test_the_ngram_table_has_one_scale_and_no_value_beyond_the_format() -> None:
    shards = {f"{TABLE}.shard_{i}.weight": (i + 1) * torch.randn(8, 16).bfloat16() for i in range(11)}
    result = fp8_layout(shards)
    scale = result[f"{TABLE}.weight_scale"]
    assert (scale.shape, scale.dtype) == ((1,), torch.bfloat16)
    for name, weight in shards.items():
        assert torch.isfinite(result[name].float()).all()
        error = (result[name].float() * scale.float() - weight.float()).abs()
        assert (error <= weight.float().abs() / 15 + scale.float() * 2**-9).all()


def test_tensors_that_stay_are_the_same_objects() -> None:
    norm = torch.ones(4)
    assert fp8_layout({"model.language_model.layers.0.self_attn.q_norm.weight": norm}).popitem()[1] is norm


@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), limit=st.integers(1, 60))
def test_shards_hold_every_tensor_once_and_stay_below_the_limit(sizes: list[int], limit: int) -> None:
    tensors = {f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)}
    shards = shard_names(tensors, limit)
    assert sorted(n for names in shards.values() for n in names) == sorted(tensors)
    assert all(shards.values())
    for names in shards.values():
        assert len(names) == 1 or sum(len(tensors[n]) for n in names) <= limit


def test_shards_are_numbered_from_one_of_their_count() -> None:
    tensors = {f"t{i:02d}": torch.zeros(8, dtype=torch.uint8) for i in range(12)}
    assert list(shard_names(tensors, 8)) == [f"model-{i:05d}-of-00012.safetensors" for i in range(1, 13)]
