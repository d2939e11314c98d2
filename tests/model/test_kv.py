"""KV bytes per token: the published figures of the real shape, and properties of every format."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.data import data_path
from q38.model.kv import FORMATS, gdn_state_bytes, kv_bytes_per_token
from q38.model.shape import ModelShape

REAL = ModelShape.from_config(
    json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())
)
INDEX = 12 * 128 * 2 / 4


@pytest.mark.parametrize(
    ("name", "published"),
    [("bf16", 24_576), ("fp8", 12_288), ("int8", 12_672), ("int4", 6_912), ("int8ring_int4", 7_308)],
)
def test_a_format_costs_what_was_published(name: str, published: int) -> None:
    assert kv_bytes_per_token(REAL, name, context=262_144) == published + INDEX


def test_the_gdn_state_of_a_sequence_is_116_megabytes() -> None:
    assert gdn_state_bytes(REAL) == 36 * (48 * 128 * 128 * 4 + 4 * (2 * 16 * 128 + 48 * 128) * 2)


@given(st.integers(1, 300_000))
def test_the_ring_never_costs_less_than_int4_nor_more_than_both(context: int) -> None:
    ring = kv_bytes_per_token(REAL, "int8ring_int4", context=context)
    int4, int8 = (kv_bytes_per_token(REAL, name, context=context) for name in ("int4", "int8"))
    assert int4 < ring <= int4 + int8


def test_an_unknown_format_names_the_known_ones() -> None:
    with pytest.raises(InputError, match="int8ring_int4"):
        kv_bytes_per_token(REAL, "int5", context=1)


def test_every_format_is_a_multiple_of_whole_scales() -> None:
    for bits, group, _ in FORMATS.values():
        assert group == 0 or (group * bits) % 8 == 0
