"""Disk for what a killed run goes on from."""

from __future__ import annotations

import math

import pytest

from q38.checkpoint.header import ITEM_BITS
from q38.model.expected import packed_tensors
from q38.model.shape import ModelShape
from q38.recipe.bits import plan_bits
from q38.recipe.budget import sizes
from q38.recipe.scratch import scratch_bytes
from tests.recipe.test_samples import REAL, recipe

SHAPE = ModelShape.from_config(REAL)
CACHE = 64 * 2048 * SHAPE.hc_count * SHAPE.hidden_size * 2


def packed_experts() -> int:
    h, middle = SHAPE.hidden_size, SHAPE.moe_intermediate_size
    tensors = [
        t for n, k in ((middle, h), (middle, h), (h, middle)) for t in packed_tensors("m", n, k, 2, 128)
    ]
    return SHAPE.num_experts * sum(math.prod(t.shape) * ITEM_BITS[t.dtypes[0]] // 8 for t in tensors)


@pytest.mark.parametrize(
    ("method", "wanted"),
    [("rtn", 0), ("autoround", 4 * CACHE), ("expert-local", 2 * CACHE + packed_experts())],
)
def test_it_is_the_chains_and_the_experts_of_the_block_in_hand(method: str, wanted: int) -> None:
    assert scratch_bytes(recipe(64, method), SHAPE, 64, 2) == wanted


def test_q38_plan_tells_the_same_bytes() -> None:
    for method in ("rtn", "autoround", "opt-rtn"):
        tuned = recipe(64, method)
        disk = sizes(REAL, tuned, plan_bits(REAL, tuned)).disk
        assert disk["quantize, more while it runs on a GPU"] == scratch_bytes(tuned, SHAPE, 64, 2)
