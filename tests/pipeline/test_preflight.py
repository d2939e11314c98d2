"""What a machine lacks for a run is told before its first step."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB, MIB
from q38.checkpoint import writer
from q38.checkpoint.index import read_json
from q38.data import data_path
from q38.measure import host_memory
from q38.pipeline import preflight
from q38.pipeline.preflight import find_lacks
from q38.pipeline.run import dry_run, run
from q38.pipeline.setup import Setup, prepare
from q38.recipe import samples
from q38.recipe.bits import plan_bits
from q38.recipe.budget import Sizes, sizes
from q38.recipe.schema import load_recipe
from q38.serving import engines
from q38.serving import preflight as serving
from q38.serving.machine import Gpu

TRANSFORMERS = {
    "placement": {"engine": "transformers"}, "oracle": {"engine": "transformers"}, "serve": {"engine": "transformers"},
}  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The real model, as far as planning needs it."""
    directory = tmp_path / "source"
    directory.mkdir()
    shutil.copy(data_path("assets", "models", "qwen3.8-flash-next.json"), directory / "config.json")
    return directory


@pytest.fixture(scope="module")
def cost() -> Sizes:
    """Of the shipped recipe; the tests change nothing that it depends on."""
    values = read_json(data_path("assets", "models", "qwen3.8-flash-next.json"))
    recipe = load_recipe("quality-24gb")
    return sizes(values, recipe, plan_bits(values, recipe))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, cost: Sizes) -> Callable[..., None]:
    """A machine with one card; bytes in GiB."""
    monkeypatch.setattr(preflight, "plan_bits", lambda *_: {})
    monkeypatch.setattr(preflight, "sizes", lambda *_: cost)  # 2 s each

    def of(*, gpu: float = 23.5, ram: float = 30, disk: float = 400, capability: str = "12.0") -> None:
        card = Gpu("card", capability, 24 * GIB, int(gpu * GIB), "gen 5 x16", "1")
        monkeypatch.setattr(preflight, "probe_gpus", lambda: (card,))
        monkeypatch.setattr(preflight, "has_cuda_gpu", lambda: True)
        monkeypatch.setattr(engines.sglang_engine, "lacks", list)
        monkeypatch.setitem(
            engines.ENGINES, "sglang", engines.Engine("sglang", "", list, engines.sglang_engine.launch)
        )
        for module in (preflight, host_memory, serving):
            monkeypatch.setattr(module, "available_memory", lambda: int(ram * GIB))
        monkeypatch.setattr(samples, "host_memory", lambda: 32 * GIB)
        usage = shutil.disk_usage("/")._replace(free=int(disk * GIB))
        monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)

    return of


def setup(source: Path, tmp_path: Path, **sections: Any) -> Setup:
    recipe = {**load_recipe("quality-24gb").to_dict(), "source": {"path": str(source)}}
    for name, keys in sections.items():
        recipe[name] = {**recipe[name], **keys}
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    return prepare(file, tmp_path / "work")


def found(setup: Setup, *todo: str) -> dict[str, str]:
    return {lack.step: lack.what for lack in find_lacks(setup, todo or setup.step_names)}


def test_the_shipped_recipe_goes_to_its_end_on_24_gb_and_32_gb(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine()
    assert found(setup(source, tmp_path)) == {}


def test_a_model_that_transformers_would_hold_whole_is_told_with_both_shortfalls(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine()
    lacks = found(setup(source, tmp_path, **TRANSFORMERS))
    assert list(lacks) == ["build-placement", "oracle-save", "serve"]
    assert "36.1 GiB" in lacks["build-placement"] and "6.1 GiB short" in lacks["build-placement"]
    assert "468.4 GiB" in lacks["oracle-save"]
    machine(ram=500)
    assert found(setup(source, tmp_path, **TRANSFORMERS)) == {}


def test_memory_that_no_server_can_be_planned_in_is_told(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine(ram=16)
    assert "GiB short" in found(setup(source, tmp_path))["serve"]
    machine(gpu=8)
    assert "GiB short" in found(setup(source, tmp_path))["serve"]
    machine()
    assert "short" in found(setup(source, tmp_path, serve={"gpu_memory": "8GiB"}))["serve"]


def test_what_no_machine_can_serve_is_the_recipes_fault(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine()
    with pytest.raises(InputError, match=r"serve\.context: 1000000000 tokens"):
        found(setup(source, tmp_path, serve={"context": 10**9}))
    machine(capability="8.6")
    with pytest.raises(InputError, match=r"serve\.kv: fp8 needs compute capability"):
        found(setup(source, tmp_path, serve={"kv": "fp8"}))
    machine()
    assert found(setup(source, tmp_path, serve={"kv": "fp8", "context": 32768})) == {}


def test_experts_that_the_engine_of_this_machine_cannot_serve_are_told(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine(ram=500)
    wider = {"quantize": {"bits": {"experts": 4}}, **TRANSFORMERS}
    assert found(setup(source, tmp_path, **wider)) == {}
    wider["serve"] = {"engine": "auto"}
    assert "the recipe makes 4 bits" in found(setup(source, tmp_path, **wider))["serve"]


def test_the_disk_is_asked_for_what_is_still_to_be_written(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine(disk=119)
    assert "119.0 GiB free" in found(setup(source, tmp_path))["disk"]
    # 47.7 of n-gram table and twice 36.1: what quantize keeps meanwhile goes before the second.
    machine(disk=121)
    planned = setup(source, tmp_path)
    assert found(planned) == {}
    machine(disk=60)
    assert found(planned, "requant-int8", "verify", "serve") == {}
    machine(disk=80)
    assert "disk" in found(planned)
    (planned.work.ple).mkdir(parents=True)
    with (planned.work.ple / "ple.bin").open("wb") as file:
        file.truncate(int(47 * GIB))
    assert found(planned) == {}


def test_steps_that_are_done_are_not_judged(
    source: Path, tmp_path: Path, machine: Callable[..., None]
) -> None:
    machine(gpu=1, ram=1, disk=1)
    planned = setup(source, tmp_path, **TRANSFORMERS)
    assert list(found(planned, "verify")) == []
    assert list(found(planned, "oracle-check")) == []
    assert list(found(planned, "bench")) == ["serve"]


def test_a_run_is_refused_with_everything_that_is_missing_and_writes_nothing(
    tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_memory, "available_memory", lambda: MIB)
    monkeypatch.setattr(serving, "available_memory", lambda: MIB)
    recipe, work = Path(__file__).parents[1] / "data" / "fast.yaml", tmp_path / "work"
    expected = r"build-placement: .* MiB short \(.*; oracle-save: .*float32.* short \(.*oracle\.engine to none.*; serve: .* short \(set"
    with pytest.raises(ResourceError, match=expected):
        run(recipe, work, source=tiny_source)
    assert not work.exists()
    lacks = dry_run(recipe, work, source=tiny_source)["lacks"]
    assert [lack["step"] for lack in lacks] == ["build-placement", "oracle-save", "serve"]
