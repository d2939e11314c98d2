"""The references themselves, against packing, dequantization and a dense product written another way."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.checkpoint import packing
from q38.kernels import reference
from q38.residency.layout import ExpertLayout
from tests.kernels.data import make_routing, make_rows


@given(st.sampled_from([2, 4, 8]), st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_unpacking_undoes_packing(bits: int, words: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (words * 32 // bits, columns), dtype=torch.uint8, generator=generator)
    assert torch.equal(reference.unpack_codes(packing.pack(codes, bits), bits).to(torch.uint8), codes)


@pytest.mark.parametrize("bits", [2, 8])
def test_a_weight_is_the_code_less_the_zero_point_times_its_groups_signed_scale(bits: int) -> None:
    codes = torch.randint(0, 2**bits, (64, 3), dtype=torch.uint8)
    scales = torch.tensor([[0.5, -1.0, 2.0], [-0.25, 3.0, 1.0]])
    weights = reference.dequantize_words(packing.pack(codes, bits), scales, bits)
    expected = (codes.double() - 2 ** (bits - 1)) * scales.double()[[0] * 32 + [1] * 32]
    assert torch.equal(weights, expected)


def test_the_moe_reference_agrees_with_one_token_and_expert_at_a_time() -> None:
    layout = ExpertLayout(64, 32, 32)
    rows = list(make_rows(layout, 3))
    ids, weights = make_routing(4, 3, 2)
    x = torch.randn(4, 64, dtype=torch.float64)
    out = reference.moe(x, rows, ids, weights, layout, torch.float16)
    for m in range(4):
        expected = torch.zeros(64, dtype=torch.float64)
        for k in range(2):
            w13, w2 = reference.dequantize_row(rows[int(ids[m, k])], layout, torch.float16)
            gate, up = x[m] @ w13[:, :32], x[m] @ w13[:, 32:]
            expected += weights[m, k].double() * ((gate * torch.sigmoid(gate) * up) @ w2)
        assert torch.allclose(out[m], expected, rtol=1e-12)


def test_an_absent_expert_contributes_nothing() -> None:
    layout = ExpertLayout(64, 32, 32)
    rows = list(make_rows(layout, 2))
    ids, weights = torch.tensor([[0, -1]], dtype=torch.int32), torch.tensor([[0.5, 9.0]])
    x = torch.randn(1, 64)
    alone = reference.moe(x, rows, ids[:, :1], weights[:, :1], layout, torch.float16)
    assert torch.equal(reference.moe(x, rows, ids, weights, layout, torch.float16), alone)


def test_relative_error_is_nan_for_nan() -> None:
    assert not reference.relative_error(torch.tensor([float("nan")]), torch.tensor([1.0])) <= 1
