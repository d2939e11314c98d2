import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from q38.ple.cast import (
    E4M3_MAX,
    Cast,
    CastError,
    count_patterns,
    dequantize,
    is_finite,
    largest_pattern,
    scale_for,
)

EVERY = np.arange(65536, dtype=np.uint16)
FINITE = st.integers(0, 0xFFFF).filter(lambda p: p & 0x7FFF < 0x7F80)
PATTERNS = hnp.arrays(np.uint16, st.integers(1, 20), elements=FINITE)
SIXTY_FOURTH = Cast(2.0**-6)


def as_float(patterns: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(patterns.view(np.int16)).view(torch.bfloat16).float()


def pattern_of(value: float) -> int:
    return int(torch.tensor(value).bfloat16().view(torch.int16).item()) & 0xFFFF


@given(PATTERNS)
def test_the_largest_pattern_is_the_largest_magnitude(patterns):
    value = np.array([largest_pattern(patterns)], np.uint16)
    assert as_float(value).item() == as_float(patterns).abs().max().item()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_infinity_and_nan_are_seen(value):
    assert not is_finite(largest_pattern(np.array([pattern_of(1.0), pattern_of(value)], np.uint16)))


@given(st.floats(1e-30, 1e30))
def test_the_scale_is_the_smallest_bf16_that_clips_nothing(value):
    amax = torch.tensor(value).bfloat16().item()
    scale = scale_for(pattern_of(value))
    below = (torch.tensor(scale).bfloat16().view(torch.int16) - 1).view(torch.bfloat16).item()
    assert torch.tensor(scale).bfloat16().item() == scale
    assert below * E4M3_MAX < amax <= scale * E4M3_MAX


def test_an_all_zero_table_has_scale_one():
    assert scale_for(0) == 1.0


@pytest.mark.parametrize("scale", [2.0**-12, 0.0003, 1.0, 7.0])
def test_the_lookup_equals_the_arithmetic_cast(scale):
    clamped = (as_float(EVERY) / scale).clamp(-E4M3_MAX, E4M3_MAX)
    expected = clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(Cast(scale)(EVERY), expected)


def test_no_finite_value_becomes_nan():
    finite = EVERY[EVERY & 0x7FFF < 0x7F80]
    assert not ((Cast(1e-4)(finite) & 0x7F) == 0x7F).any()


@given(PATTERNS, PATTERNS)
def test_the_error_is_that_of_the_values_and_adds_up(first, second):
    total = CastError()
    for part in (first, second):
        total.add(SIXTY_FOURTH.error(count_patterns(part)))
    patterns = np.concatenate([first, second])
    value = as_float(patterns).double()
    codes = torch.from_numpy(SIXTY_FOURTH(patterns)).view(torch.float8_e4m3fn)
    error = dequantize(codes, 2.0**-6).double() - value
    assert total.values == len(patterns)
    assert total.squared_error == pytest.approx(error.square().sum().item(), rel=1e-12)
    assert total.max_error == error.abs().max().item()
    assert total.saturated == int((value.abs() * 64 > E4M3_MAX).sum())


def test_the_summary_counts_values_that_became_zero():
    cast = Cast(1.0)
    tiny = np.array([pattern_of(1e-6), pattern_of(0.0), pattern_of(1.0), pattern_of(2.0)], np.uint16)
    assert cast.error(count_patterns(tiny)).summary()["flushed_to_zero_fraction"] == 0.25
