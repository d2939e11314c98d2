"""Sizes as people write them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.base.units import format_bytes, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GiB", 24 * 2**30),
        ("32 GB", 32 * 10**9),
        ("1048576", 1048576),
        ("1.5k", 1536),
        ("2T", 2 * 2**40),
        ("7b", 7),
    ],
)
def test_sizes_are_read_as_written(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "24 gigabytes", "1 2"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(InputError, match="--gpu"):
        parse_bytes(text, where="--gpu")


@given(st.integers(0, 2**60))
def test_a_formatted_size_is_near_the_size(n: int) -> None:
    assert parse_bytes(format_bytes(n)) == pytest.approx(n, rel=0.06, abs=1)


@pytest.mark.parametrize(
    ("seconds", "text"), [(4.24, "4.2 s"), (75.2, "1:15"), (3600, "1:00:00"), (59.99, "60.0 s")]
)
def test_seconds_are_short_below_a_minute_and_a_clock_above(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
