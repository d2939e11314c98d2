"""The plan: published sizes from config alone, and a split between GPU and host that adds up."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as profile
from hypothesis import strategies as st

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB
from q38.checkpoint.index import read_json
from q38.data import data_path
from q38.model.names import Group
from q38.recipe.bits import plan_bits
from q38.recipe.budget import Sizes, machine_plan, read_cost, sizes
from q38.recipe.schema import load_recipe

CONFIG = data_path("assets", "models", "qwen3.8-flash-next.json")
VALUES = read_json(CONFIG)


@pytest.fixture(scope="module")
def cost() -> Sizes:
    recipe = load_recipe("quality-24gb")
    return sizes(VALUES, recipe, plan_bits(VALUES, recipe))


def test_the_published_recipe_has_its_published_tensors_and_bytes(cost: Sizes) -> None:
    assert cost.tensors == 222_856
    assert cost.tensor_bytes == 38_755_352_600
    assert cost.ngram_bytes == 51_200_245_760
    assert cost.row_bytes == 1_305_600


def test_groups_add_up_to_the_whole(cost: Sizes) -> None:
    assert sum(g.bytes for g in cost.groups) == cost.tensor_bytes
    assert sum(g.tensors for g in cost.groups) == cost.tensors
    assert next(g for g in cost.groups if g.group == Group.EXPERTS).parameters == 24_576 * 3 * 640 * 2560


@given(
    context=st.integers(1, 262_144),
    gpu=st.integers(18, 40),
    kv=st.sampled_from(["bf16", "fp8", "int8", "int4", "int8ring_int4"]),
)
@profile(max_examples=60)
def test_every_row_lies_in_exactly_one_place(cost: Sizes, context: int, gpu: int, kv: str) -> None:
    plan = machine_plan(VALUES, cost, gpu_total=gpu * GIB, ram_total=64 * GIB, context=context, kv_format=kv)
    rows = plan.gpu["resident expert rows"] + plan.host["pinned expert rows"]
    assert rows == 48 * 512 * cost.row_bytes
    assert sum(plan.gpu.values()) + plan.gpu_left == plan.gpu_total
    assert plan.gpu_left >= 0
    assert plan.resident_per_layer == 512 or plan.gpu_left < 48 * cost.row_bytes


def test_a_ring_for_staged_rows_is_in_the_plan_where_a_chunk_reads_most_of_them(cost: Sizes) -> None:
    def ring(gpu: int, chunk: int) -> int:
        plan = machine_plan(
            VALUES,
            cost,
            gpu_total=gpu * GIB,
            ram_total=64 * GIB,
            context=32_768,
            kv_format="fp8",
            chunk=chunk,
        )
        rows, left = divmod(plan.gpu["prefill staging"], cost.row_bytes)
        assert left == 0
        host = 512 - plan.resident_per_layer
        assert rows == 0 or 0.45 * host <= rows <= 0.55 * host
        return rows

    assert ring(24, 2048) > 100
    assert ring(24, 64) == 0  # 640 choices among 512 experts leave many rows out
    assert ring(60, 2048) == 0  # nothing on the host


def test_a_host_that_is_too_small_is_told_what_is_missing(cost: Sizes) -> None:
    with pytest.raises(ResourceError, match=r"\d+\.\d\d GiB short") as failure:
        machine_plan(VALUES, cost, gpu_total=24 * GIB, ram_total=16 * GIB, context=32_768, kv_format="fp8")
    assert failure.value.exit_code == 3


def test_a_gpu_that_is_too_small_is_told_what_is_missing(cost: Sizes) -> None:
    with pytest.raises(ResourceError, match=r"GPU.*short"):
        machine_plan(VALUES, cost, gpu_total=6 * GIB, ram_total=64 * GIB, context=32_768, kv_format="fp8")


def test_a_directory_stands_for_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(CONFIG.read_bytes())
    assert read_cost(tmp_path, "quality-24gb") == read_cost(CONFIG, "quality-24gb")


def test_an_unknown_layout_names_its_option() -> None:
    with pytest.raises(InputError, match="--source-layout"):
        read_cost(CONFIG, "quality-24gb", source_layout="fp16")
