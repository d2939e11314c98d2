"""`q38 plan` places a model as `q38 serve` would, from config.json alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB
from q38.data import data_path
from q38.serving import sglang_plan
from q38.serving.engines import ServeOptions
from q38.serving.machine import Gpu
from q38.serving.recipe_plan import Fit, plan_recipe
from q38.serving.sglang_engine import launch
from q38.serving.sglang_settings import SglangSettings

RELEASE = data_path("assets", "models", "qwen3.8-flash-next.json")
FAST = Path(__file__).parents[1] / "data" / "fast.yaml"


def fit(config: Path, recipe: str, gpu: str = "23.9GiB", ram: str = "28GiB", **given: Any) -> Fit:
    _, found = plan_recipe(config, recipe, gpu=gpu, ram=ram, settings=SglangSettings(**given))
    assert isinstance(found, Fit), found
    return found


@pytest.mark.parametrize("given", [{}, {"kv": "int8"}, {"context": 4096, "chunk": 512, "requests": 2}])
def test_it_is_the_servers_plan(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]
) -> None:
    card = Gpu("card", "12.0", 24 * GIB, int(23.9 * GIB), "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 28 * GIB)
    served = launch(ServeOptions(tiny_packed, tiny_ple, port=7, sglang=SglangSettings(**given))).figures
    planned = fit(tiny_packed, str(FAST), **given).plan.to_dict()
    assert {**{what: served[what] for what in planned}, "disk": {}} == planned


def test_the_release_on_a_24_gb_card_as_it_was_measured() -> None:
    """docs/performance.md: 10,222 rows at the start, 8,912 with the whole context, 19.0 GiB pinned."""
    found = fit(RELEASE, "quality-24gb", kv="int8ring_int4")
    assert (found.plan.device_rows, found.plan.fewest_device_rows) == (10_222, 8_912)
    assert (found.resident_per_layer, found.resident_when_full) == (213, 186)
    assert found.host["pinned expert rows"] / GIB == pytest.approx(19.03, abs=0.01)
    assert (found.resolved.context, found.plan.chunk) == (262_144, 4096)


def test_what_is_left_is_beside_the_parts_that_add_up() -> None:
    found = fit(RELEASE, "quality-24gb")
    assert sum(found.gpu.values()) + found.to_dict()["gpu_left"] == int(23.9 * GIB)
    assert sum(found.host.values()) + found.to_dict()["ram_left"] == 28 * GIB


def test_what_serve_refuses_is_refused() -> None:
    settings = SglangSettings(requests=65)
    with pytest.raises(InputError, match="--requests: 65 requests at a time"):
        plan_recipe(RELEASE, "quality-24gb", gpu="23.9GiB", ram="28GiB", settings=settings)


def test_experts_of_another_width_have_a_cost_and_no_place(tmp_path: Path) -> None:
    wider = tmp_path / "wider.yaml"
    wider.write_text("schema: q38.recipe/1\nname: wider\nquantize:\n  bits: {experts: 4}\n")
    cost, failure = plan_recipe(RELEASE, str(wider), gpu="200GiB", ram="200GiB", settings=SglangSettings())
    assert cost.groups and isinstance(failure, ResourceError)
    assert "experts at 4 bits" in str(failure)


def test_a_machine_that_is_too_small_leaves_the_cost() -> None:
    cost, failure = plan_recipe(
        RELEASE, "quality-24gb", gpu="23.9GiB", ram="12GiB", settings=SglangSettings()
    )
    assert cost.tensors == 222_856
    assert isinstance(failure, ResourceError)
    assert "short" in str(failure)


@pytest.mark.parametrize(
    ("sizes", "given", "option"),
    [
        ({"gpu": "much", "ram": "28GiB"}, {}, "--gpu"),
        ({"gpu": "24GiB", "ram": "28GiB"}, {"kv": "fp4"}, "--kv"),
        ({"gpu": "24GiB", "ram": "28GiB"}, {"context": 300_000}, "--context"),
        ({"gpu": "24GiB", "ram": "28GiB"}, {"chunk": 0}, "--chunk"),
    ],
)
def test_what_the_server_refuses_is_refused(
    sizes: dict[str, str], given: dict[str, Any], option: str
) -> None:
    with pytest.raises(InputError, match=f"^{option}: "):
        plan_recipe(RELEASE, "quality-24gb", **sizes, settings=SglangSettings(**given))
