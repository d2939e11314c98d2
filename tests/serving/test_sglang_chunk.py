"""The length of a prefill step: as long as its working memory costs few rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from q38.base.errors import ResourceError
from q38.base.units import GIB
from q38.data import data_path
from q38.recipe.bits import plan_bits
from q38.recipe.budget import MachinePlan, Sizes, machine_plan, sizes
from q38.recipe.schema import load_recipe
from q38.serving.sglang_plan import _widest
from q38.serving.sglang_settings import Resolved, SglangSettings, resolve

CONFIG = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())


@pytest.fixture(scope="module")
def cost() -> Sizes:
    recipe = load_recipe("quality-24gb")
    return sizes(CONFIG, recipe, plan_bits(CONFIG, recipe))


def chosen(cost: Sizes, *, gpu: int, ram: int = 64, **given: Any) -> MachinePlan:
    resolved: Resolved = resolve(SglangSettings(**given), CONFIG, where="config.json")

    def plan(chunk: int) -> MachinePlan:
        return machine_plan(
            CONFIG,
            cost,
            gpu_total=gpu * GIB,
            ram_total=ram * GIB,
            context=resolved.context,
            kv_format="fp8",
            chunk=chunk,
        )

    return _widest(plan, resolved, given="chunk" in given)


def test_a_step_is_as_long_as_memory_allows(cost: Sizes) -> None:
    assert chosen(cost, gpu=13).chunk == 2048
    assert chosen(cost, gpu=24).chunk == 4096
    assert chosen(cost, gpu=60).chunk == 8192  # every row fits beside it
    for gpu in (13, 24, 60):
        least = chosen(cost, gpu=gpu, chunk=2048)
        assert chosen(cost, gpu=gpu).resident_per_layer >= 0.9 * least.resident_per_layer


def test_no_longer_than_the_context_or_than_was_asked_for(cost: Sizes) -> None:
    assert chosen(cost, gpu=60, context=4095).chunk == 2048
    assert chosen(cost, gpu=60, context=1000).chunk == 1000
    assert chosen(cost, gpu=60, chunk=512).chunk == 512


def test_a_longer_step_whose_rows_do_not_fit_the_host_is_not_taken(cost: Sizes) -> None:
    least = chosen(cost, gpu=24, chunk=2048)
    longer = chosen(cost, gpu=24, chunk=4096)
    between = (sum(least.host.values()) + sum(longer.host.values())) // 2 / GIB
    resolved = resolve(SglangSettings(), CONFIG, where="config.json")

    def plan(chunk: int) -> MachinePlan:
        return machine_plan(
            CONFIG,
            cost,
            gpu_total=24 * GIB,
            ram_total=int(between * GIB),
            context=resolved.context,
            kv_format="fp8",
            chunk=chunk,
        )

    with pytest.raises(ResourceError):
        plan(4096)
    assert _widest(plan, resolved, given=False).chunk == 2048
