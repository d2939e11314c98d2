"""Symmetric INT8 rounding, against a second computation in numpy float64 and against its own bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.checkpoint.int8 import BITS, MIN_SCALE, Errors, deviation, round_int8
from q38.checkpoint.packing import dequantize, pack, symmetric_zeros

GROUP = 128


def weights(seed: int, n: int = 8, k: int = 2 * GROUP, spread: float = 0.02) -> torch.Tensor:
    return spread * torch.randn(n, k, generator=torch.Generator().manual_seed(seed))


def restored(weight: torch.Tensor, *, clip_search: bool = False) -> torch.Tensor:
    """The float32 weights [n, K] that the packed tensors stand for, read back by q38's dequantizer."""
    n, k = weight.shape
    part = round_int8(weight, GROUP, clip_search=clip_search)
    words = pack(part.codes.t().contiguous(), BITS)
    return dequantize(words, symmetric_zeros(k // GROUP, n, BITS), part.scales.t().contiguous(), BITS)


@given(seed=st.integers(0, 2**31), spread=st.sampled_from([1e-4, 0.02, 3.0]))
def test_every_weight_lands_on_the_nearest_level_of_the_stored_scale(seed: int, spread: float) -> None:
    weight = weights(seed, spread=spread)
    part = round_int8(weight, GROUP)
    scale = part.scales.double().repeat_interleave(GROUP, 1)  # [n, K]
    levels = (np.arange(256) - 128)[:, None, None] * scale.numpy()
    nearest = np.abs(levels - weight.double().numpy()).min(0)
    found = (part.codes.double() - 128) * scale
    # float32 division may take the other of two levels that are equally near.
    assert np.allclose(np.abs(found.numpy() - weight.double().numpy()), nearest, atol=1e-6 * spread)


@given(seed=st.integers(0, 2**31))
def test_the_scale_is_the_largest_magnitude_over_127_in_float16(seed: int) -> None:
    weight = weights(seed)
    largest = np.abs(weight.numpy().reshape(8, 2, GROUP)).max(-1)
    assert np.array_equal(
        round_int8(weight, GROUP).scales.numpy(), (largest / np.float32(127)).astype(np.float16)
    )


def test_nothing_is_clipped_without_a_search() -> None:
    assert round_int8(weights(0, n=200), GROUP).errors.clipped == 0


def test_reported_errors_are_those_of_the_packed_tensors() -> None:
    weight = weights(1, n=48)
    found = deviation([round_int8(weight, GROUP).errors], GROUP)
    difference, original = (restored(weight) - weight).double(), weight.double()
    assert found.relative_error == pytest.approx(float(difference.norm() / original.norm()), rel=1e-5)
    groups = difference.view(48, 2, GROUP).norm(dim=-1) / original.view(48, 2, GROUP).norm(dim=-1)
    assert found.worst_relative_error == pytest.approx(float(groups.max()), rel=1e-5)
    assert groups[found.worst_row, found.worst_group] == groups.max()


@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(1, 19), max_size=4))
def test_errors_do_not_depend_on_how_the_rows_were_divided(seed: int, cuts: list[int]) -> None:
    weight = weights(seed, n=20)
    whole = round_int8(weight, GROUP)
    pieces = [piece for piece in torch.tensor_split(weight, sorted(cuts)) if len(piece)]
    parts = [round_int8(piece, GROUP) for piece in pieces]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert deviation([part.errors for part in parts], GROUP) == deviation([whole.errors], GROUP)


@given(seed=st.integers(0, 2**31))
def test_the_clip_search_makes_no_group_worse(seed: int) -> None:
    weight = weights(seed)
    plain, searched = round_int8(weight, GROUP), round_int8(weight, GROUP, clip_search=True)
    assert (searched.errors.squared_error <= plain.errors.squared_error).all()


def test_the_clip_search_lowers_the_error_of_random_weights() -> None:
    weight = weights(2, n=100)
    plain = deviation([round_int8(weight, GROUP).errors], GROUP)
    searched = deviation([round_int8(weight, GROUP, clip_search=True).errors], GROUP)
    assert searched.relative_error < 0.99 * plain.relative_error
    assert searched.clipped_fraction > 0


def test_clipped_weights_are_counted() -> None:
    weight = weights(3, n=100)
    searched = round_int8(weight, GROUP, clip_search=True)
    steps = (weight.view(100, 2, GROUP) / searched.scales.float().unsqueeze(-1)).round()
    assert searched.errors.clipped == int(((steps > 127) | (steps < -128)).sum()) > 0


def test_a_group_of_zeros_stays_zero() -> None:
    weight = weights(4)
    weight[2, :GROUP] = 0
    part = round_int8(weight, GROUP, clip_search=True)
    assert (part.codes[2, :GROUP] == 128).all()
    assert part.scales[2, 0] == MIN_SCALE
    assert (restored(weight)[2, :GROUP] == 0).all()


def test_a_matrix_of_zeros_has_no_error() -> None:
    found = deviation([round_int8(torch.zeros(3, GROUP), GROUP).errors], GROUP)
    assert (found.relative_error, found.worst_relative_error) == (0.0, 0.0)


def test_weights_below_the_smallest_float16_step_do_not_become_nan() -> None:
    weight = weights(5, spread=1e-9)
    assert torch.isfinite(restored(weight)).all()


def test_the_worst_group_is_named() -> None:
    error, norm = torch.full((4, 3), 1e-6), torch.ones(4, 3)
    error[2, 1] = 0.25
    found = deviation([Errors(error, norm, 0)], GROUP)
    assert (found.worst_row, found.worst_group, found.worst_relative_error) == (2, 1, 0.5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e9])
@pytest.mark.parametrize("clip_search", [False, True])
def test_a_weight_that_float16_scales_cannot_hold_shows_in_the_scale(value: float, clip_search: bool) -> None:
    weight = weights(6)
    weight[3, GROUP] = value
    finite = torch.isfinite(round_int8(weight, GROUP, clip_search=clip_search).scales)
    assert not finite[3, 1]
    assert int((~finite).sum()) == 1


def test_a_scale_below_the_steps_of_float16_counts_what_it_clips() -> None:
    weight = torch.full((1, GROUP), 1.4 * 127 * 2.0**-24)  # the scale rounds down to 2^-24
    part = round_int8(weight, GROUP)
    assert part.errors.clipped == GROUP
    assert (part.codes == 255).all()
