"""Plain rounding, against AutoRound's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.checkpoint.packing import WIDTHS, dequantize, symmetric_zeros
from q38.quantize import rtn


def matrix(n: int = 64, k: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", WIDTHS)
def test_it_equals_autorounds_plain_rounding_bit_for_bit(bits: int, dtype: torch.dtype) -> None:
    from auto_round.data_type.int import quant_tensor_rtn_sym

    weight = matrix().to(dtype)
    weight[3, :128] = 0
    theirs, scale, _ = quant_tensor_rtn_sym(weight.clone(), bits=bits, group_size=128)
    ours = rtn.round_to_nearest(weight, bits, 128)
    assert torch.equal(dequantize(*ours, bits).to(dtype), theirs)
    assert torch.equal(ours.scales.t(), scale.view(64, 2).to(torch.float16))


@given(bits=st.sampled_from(WIDTHS), seed=st.integers(0, 1000))
def test_no_weight_moves_by_more_than_one_step_and_most_by_half(bits: int, seed: int) -> None:
    weight = matrix(seed=seed)
    packed = rtn.round_to_nearest(weight, bits, 64)
    step = packed.scales.float().abs().repeat_interleave(64, dim=0).t()  # [N, K]
    error = (dequantize(*packed, bits) - weight).abs() / step
    # The side without a code of its own is clamped; a rounded scale shifts the outermost code.
    assert error.max() <= 1.01 + 2.0 ** (bits - 12)
    assert (error <= 0.51).float().mean() > 0.5


def test_the_largest_weight_of_a_group_lands_on_the_outermost_code() -> None:
    weight = torch.zeros(32, 64)
    weight[0, 5], weight[1, 5] = 3.0, -3.0
    packed = rtn.round_to_nearest(weight, 2, 64)
    assert packed.scales[0, 0] == -1.5
    assert packed.scales[0, 1] == 1.5
    assert dequantize(*packed, 2)[:2, 5].tolist() == [3.0, -3.0]


def test_zero_points_are_symmetric() -> None:
    packed = rtn.round_to_nearest(matrix(), 8, 128)
    assert torch.equal(packed.qzeros, symmetric_zeros(2, 64, 8))


def test_rounding_in_slices_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = matrix(n=96)
    whole = rtn.round_to_nearest(weight, 3, 128)
    monkeypatch.setattr(rtn, "_CHUNK", 256 * 32)
    assert all(torch.equal(a, b) for a, b in zip(whole, rtn.round_to_nearest(weight, 3, 128), strict=True))
