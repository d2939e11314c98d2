"""How many calibration sequences a host holds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from q38.base.errors import ResourceError
from q38.base.units import GIB
from q38.data import data_path
from q38.model.shape import ModelShape
from q38.recipe.samples import MOST, SHARE, host_need, with_samples
from q38.recipe.schema import Recipe, parse_recipe

REAL = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())


def recipe(samples: Any, method: str = "autoround") -> Recipe:
    return parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "test",
            "calibration": {"samples": samples},
            "quantize": {"experts": {"method": method}},
        }
    )


def samples(value: Any, total: int, method: str = "autoround", **options: Any) -> int:
    options = {"item": 2, **options}
    return with_samples(recipe(value, method), REAL, total=total, **options).calibration.samples


def test_on_a_32_gb_machine_the_published_number_takes_at_most_28_gib() -> None:
    total = 32 * GIB
    found = samples("auto", total)
    need = host_need(recipe(found), ModelShape.from_config(REAL), found, total, 2)
    assert found == MOST
    assert need.cache == 128 * 2048 * 10240 * 2
    assert need.total <= need.limit == 28 * GIB


def test_auto_takes_fewer_on_a_smaller_host_and_no_more_than_the_most_on_a_larger_one() -> None:
    sizes = [samples("auto", n * GIB) for n in (20, 24, 28, 64, 1024)]
    assert sizes == sorted(sizes)
    assert 0 < sizes[0] < sizes[1] < sizes[2] < MOST == sizes[3] == sizes[4]
    for total, found in zip((20, 24, 28), sizes, strict=False):
        for count, fits in ((found, True), (found + 1, False)):
            need = host_need(recipe(1), ModelShape.from_config(REAL), count, total * GIB, 2)
            assert (need.total <= SHARE * total * GIB) == fits


def test_methods_that_keep_one_stream_less_hold_more() -> None:
    assert samples("auto", 24 * GIB, "expert-local") > samples("auto", 24 * GIB)


def test_a_cpu_that_computes_in_float32_holds_fewer() -> None:
    shape = ModelShape.from_config(REAL)
    gpu, cpu = (host_need(recipe(64), shape, 64, 64 * GIB, item) for item in (2, 4))
    assert cpu.cache == 2 * gpu.cache
    assert samples("auto", 32 * GIB, item=4) < samples("auto", 32 * GIB) // 2
    with pytest.raises(ResourceError, match="128 calibration sequences need"):
        samples(128, 32 * GIB, item=4)


def test_a_number_that_does_not_fit_is_refused_with_the_one_that_does() -> None:
    with pytest.raises(
        ResourceError, match=r"512 calibration sequences need .* short.* Set it to \d+ or auto"
    ):
        samples(512, 32 * GIB)
    assert samples(512, 32 * GIB, check=False) == 512
    assert samples(512, 128 * GIB) == 512


def test_a_host_that_holds_no_sequence_is_refused_and_plain_rounding_is_not() -> None:
    with pytest.raises(ResourceError, match="by method rtn"):
        samples("auto", 8 * GIB)
    assert samples("auto", 8 * GIB, "rtn") == MOST


def test_the_word_and_the_zero_are_one() -> None:
    assert recipe("auto").sha256 == recipe(0).sha256 != recipe(128).sha256
