"""Loading packed experts into rows."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.model.shape import ModelShape
from q38.residency.cache import ExpertCache, open_cache
from q38.residency.layout import ExpertLayout
from q38.residency.loader import load_rows
from q38.residency.pool import HostLimits
from q38.residency.shards import expert_layout, plan_reads
from tests.residency.fake_driver import FakeDriver
from tests.residency.packed import (
    PREFIX,
    expected_row,
    make_checkpoint,
    packed_config,
    random_experts,
    write_checkpoint,
)

LAYERS = 4


def cache_for(
    layout: ExpertLayout, experts: int, driver: FakeDriver, *, resident: int = 2, spare: int = 4
) -> ExpertCache:
    mask = np.zeros((LAYERS, experts), bool)
    mask[:, :resident] = True
    return open_cache(
        driver, layout.row_bytes, mask, np.ones((LAYERS, experts)), stream=driver.new_stream(), spare=spare, chunk=4096,
        limits=HostLimits(2**40, None), threads=1,
    )  # fmt: skip


def assert_rows(
    cache: ExpertCache,
    driver: FakeDriver,
    tensors: dict[str, torch.Tensor],
    layout: ExpertLayout,
    experts: int,
) -> None:
    table = (
        driver.tensor(cache.store.table.address, cache.store.table.nbytes)
        .view(torch.int64)
        .view(LAYERS, experts)
    )
    for layer in range(LAYERS):
        for expert in range(experts):
            row = torch.from_numpy(driver.bytes_at(int(table[layer, expert]), layout.row_bytes))
            assert torch.equal(row, expected_row(tensors, layout, layer, expert)), (layer, expert)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_every_row_holds_its_expert_as_the_layout_orders_it(tmp_path: Path, bits: int) -> None:
    checkpoint, layout, tensors = make_checkpoint(tmp_path, bits=bits)
    driver = FakeDriver(granularity=4096)
    cache = cache_for(layout, 4, driver)
    report = load_rows(checkpoint, layout, cache.store, readers=2, unit=layout.row_bytes * 3)
    assert_rows(cache, driver, tensors, layout, 4)
    assert report.rows == LAYERS * 4 and report.readers == 2 and report.scale_dtype == "F16"
    assert report.nbytes == sum(t.nbytes for t in tensors.values())


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**16),
    shards=st.integers(1, 5),
    unit=st.integers(1, 200_000),
    resident=st.integers(0, 4),
    direct=st.sampled_from([None, True, False]),
)
def test_rows_come_out_alike_whatever_the_order_of_tensors_and_units(
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
    shards: int,
    unit: int,
    resident: int,
    direct: bool | None,
) -> None:
    config = packed_config(intermediate=256)
    out = tmp_path_factory.mktemp("shuffled")
    checkpoint, layout, tensors = make_checkpoint(out / "plain", intermediate=256)
    names = [*tensors, "mtp.layers.0.mlp.experts.0.gate_proj.qweight", "lm_head.weight"]
    tensors |= dict.fromkeys(names[-2:], torch.ones(3, 5))
    random.Random(seed).shuffle(names)
    checkpoint = write_checkpoint(
        out / "shuffled", config, tensors, [names[i::shards] for i in range(shards)]
    )
    driver = FakeDriver(granularity=4096)
    cache = cache_for(layout, 4, driver, resident=resident)
    load_rows(checkpoint, layout, cache.store, unit=unit, direct=direct)
    assert_rows(cache, driver, tensors, layout, 4)


def test_borrowed_slots_are_given_back_and_memory_is_bounded_by_the_units(tmp_path: Path) -> None:
    checkpoint, layout, _ = make_checkpoint(tmp_path)
    driver = FakeDriver(granularity=4096)
    cache = cache_for(layout, 4, driver, spare=5)
    report = load_rows(checkpoint, layout, cache.store, readers=64)
    assert report.readers <= 2
    assert cache.store.pool.slots.free == 5
    plan = plan_reads(checkpoint, layout, unit=layout.row_bytes)
    assert max(unit.nbytes for unit in plan.units) < 2 * layout.row_bytes


def test_a_pool_without_two_free_slots_is_refused(tmp_path: Path) -> None:
    checkpoint, layout, _ = make_checkpoint(tmp_path)
    driver = FakeDriver(granularity=4096)
    with pytest.raises(ResourceError, match="2 free slots needed to load through, 1 are free"):
        load_rows(checkpoint, layout, cache_for(layout, 4, driver, spare=1).store)


def broken(tmp_path: Path, name: str, tensor: torch.Tensor | None) -> tuple[Checkpoint, ExpertLayout]:
    """The small checkpoint with one tensor replaced, or left out."""
    _, layout, tensors = make_checkpoint(tmp_path / "whole")
    if tensor is None:
        del tensors[name]
    else:
        tensors[name] = tensor
    return write_checkpoint(tmp_path / "broken", packed_config(), tensors, [list(tensors)]), layout


def refusal(checkpoint: Checkpoint, layout: ExpertLayout) -> str:
    driver = FakeDriver(granularity=4096)
    cache = cache_for(layout, 4, driver)
    with pytest.raises(InputError) as error:
        load_rows(checkpoint, layout, cache.store)
    assert cache.store.pool.slots.free == 4, "borrowed slots were kept"
    return str(error.value)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    message = refusal(*broken(tmp_path, f"{PREFIX}.2.mlp.experts.3.up_proj.scales", None))
    assert "expert 3 of layer 2 lacks up_proj.scales" in message


@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
def test_a_scale_that_is_not_finite_is_refused(tmp_path: Path, value: float) -> None:
    scales = torch.ones(2, 128, dtype=torch.float16)
    scales[1, 7] = value
    name = f"{PREFIX}.1.mlp.experts.0.gate_proj.scales"
    assert f"1 scales of {name} are not finite" in refusal(*broken(tmp_path, name, scales))


def test_the_largest_finite_scale_and_a_subnormal_are_accepted(tmp_path: Path) -> None:
    scales = torch.full((2, 128), -65504.0).half()
    scales[0, 0] = 6e-8
    name = f"{PREFIX}.1.mlp.experts.0.gate_proj.scales"
    checkpoint, layout = broken(tmp_path, name, scales)
    load_rows(checkpoint, layout, cache_for(layout, 4, FakeDriver(granularity=4096)).store)


def test_an_asymmetric_zero_point_is_refused(tmp_path: Path) -> None:
    zeros = torch.full((2, 8), 0x55555555, dtype=torch.int32)
    zeros[1, 7] ^= 1
    name = f"{PREFIX}.0.mlp.experts.1.up_proj.qzeros"
    assert f"{name} is not symmetric" in refusal(*broken(tmp_path, name, zeros))


def test_a_tensor_of_another_shape_is_refused_with_both_shapes(tmp_path: Path) -> None:
    name = f"{PREFIX}.0.mlp.experts.1.down_proj.qweight"
    message = refusal(*broken(tmp_path, name, torch.zeros(16, 256, dtype=torch.int32)))
    assert f"tensor {name} is I32 [16, 256], not I32 [8, 256]" in message


def test_scales_of_two_dtypes_are_refused(tmp_path: Path) -> None:
    name = f"{PREFIX}.3.mlp.experts.3.down_proj.scales"
    message = refusal(*broken(tmp_path, name, torch.ones(1, 256, dtype=torch.bfloat16)))
    assert f"tensor {name} is BF16 [1, 256], not F16 [1, 256]" in message


def test_a_file_cut_after_opening_is_refused(tmp_path: Path) -> None:
    checkpoint, layout, _ = make_checkpoint(tmp_path)
    file = sorted(tmp_path.glob("*.safetensors"))[-1]
    with file.open("r+b") as f:
        f.truncate(file.stat().st_size - 5000)
    assert "the file ends at byte" in refusal(checkpoint, layout)


def test_a_failing_driver_stops_the_load_and_gives_the_slots_back(tmp_path: Path) -> None:
    checkpoint, layout, _ = make_checkpoint(tmp_path)
    driver = FakeDriver(granularity=4096)
    cache = cache_for(layout, 4, driver)
    driver.fail_at = 12
    with pytest.raises(ResourceError, match="out of memory"):
        load_rows(checkpoint, layout, cache.store)
    assert cache.store.pool.slots.free == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing_format": "auto_round:auto_awq"}, "packed as 'auto_round:auto_awq'"),
        ({"sym": False}, "sym is not true"),
        ({"bits": 3}, "experts packed at 3 bits"),
        ({"group_size": -1}, "group_size -1"),
        ({"group_size": 96}, "not a multiple of the group size 96"),
    ],
)
def test_packings_that_rows_cannot_hold_are_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    config = packed_config()
    tensors = random_experts(config, ExpertLayout(256, 128))
    config["quantization_config"] |= change
    checkpoint = write_checkpoint(tmp_path, config, tensors, [list(tensors)])
    with pytest.raises(InputError, match=message):
        expert_layout(checkpoint)


def test_a_checkpoint_quantized_by_autoround_loads_into_its_rows(tiny_quantized: Path) -> None:
    checkpoint = Checkpoint.open(tiny_quantized)
    layout, shape = expert_layout(checkpoint), ModelShape.from_config(checkpoint.config)
    driver = FakeDriver(granularity=4096)
    cache = cache_for(layout, shape.num_experts, driver)
    load_rows(checkpoint, layout, cache.store)
    names = [n for n in checkpoint.tensors if n.startswith(PREFIX) and ".mlp.experts." in n]
    tensors = {n: checkpoint.read(n) for n in names}
    assert len(names) == shape.num_layers * shape.num_experts * 9
    assert_rows(cache, driver, tensors, layout, shape.num_experts)
