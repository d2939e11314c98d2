"""--kv: which cache SGLang is told to have and which the extension stores, what it takes, and what auto picks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.data import data_path
from q38.kvcache.layout import KvLayout
from q38.model.kv import kv_bytes_per_token
from q38.model.names import Group
from q38.model.shape import ModelShape
from q38.recipe.budget import Sizes, machine_plan
from q38.serving import sglang_plan
from q38.serving.engines import ServeOptions
from q38.serving.kv_choice import BY_ERROR, choose_kv
from q38.serving.machine import Gpu
from q38.serving.sglang_engine import launch
from q38.serving.sglang_plan import ServePlan, Weights, plan_for
from q38.serving.sglang_settings import KV_FORMATS, Resolved, SglangSettings
from q38.sglang_ext.options import ExtensionOptions

GIB = 2**30
CONFIG = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("card", "12.0", 24 * GIB, 23 * GIB, "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 30 * GIB)


def started(
    model: Path, ple: Path, **given: Any
) -> tuple[list[str], ExtensionOptions, list[str], dict[str, Any]]:
    found = launch(ServeOptions(model, ple, port=7, sglang=SglangSettings(**given)))
    return (
        found.command,
        ExtensionOptions.from_json(found.environment["Q38_SGLANG"]),
        found.plan,
        found.figures,
    )


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", list(KV_FORMATS))
def test_quantized_formats_are_bf16_to_sglang_and_stored_by_the_extension(
    tiny_packed: Path, tiny_ple: Path, name: str
) -> None:
    command, extension, plan, figures = started(tiny_packed, tiny_ple, context=1024, kv=name)
    own = name in ("bf16", "fp8")
    assert command[command.index("--kv-cache-dtype") + 1] == ("fp8_e4m3" if name == "fp8" else "bfloat16")
    assert extension.kv == (None if own else name)
    assert extension.kv_lazy is not own
    shape = ModelShape.from_config(Checkpoint.open(tiny_packed).config)
    per_token = kv_bytes_per_token(shape, name, context=1024)
    assert f"KV cache: {name}, {per_token:,.0f} bytes a token" in plan
    assert figures["kv_headroom"] == figures["device"]["prefill working set"]


@pytest.mark.parametrize(("capability", "refused"), [("8.6", True), ("8.9", False), ("12.0", False)])
def test_fp8_is_refused_where_no_kernel_reads_it(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch, capability: str, refused: bool
) -> None:
    card = Gpu("card", capability, 24 * GIB, 23 * GIB, "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 30 * GIB)
    if refused:
        with pytest.raises(InputError, match=r"--kv: fp8 needs compute capability 8\.9, card has 8\.6"):
            started(tiny_packed, tiny_ple, context=1024, kv="fp8")
    else:
        started(tiny_packed, tiny_ple, context=1024, kv="fp8")
    started(tiny_packed, tiny_ple, context=1024, kv="int8")


def test_more_requests_than_the_buffers_hold_are_refused_at_the_start(
    tiny_packed: Path, tiny_ple: Path
) -> None:
    with pytest.raises(InputError, match="--requests: 65 requests at a time"):
        started(tiny_packed, tiny_ple, device="cpu", context=256, requests=65)


@pytest.mark.parametrize("name", list(KV_FORMATS))
def test_on_a_cpu_the_extension_stores_fp8_too(tiny_packed: Path, tiny_ple: Path, name: str) -> None:
    command, extension, _, _ = started(tiny_packed, tiny_ple, device="cpu", context=256, kv=name, kv_ring=64)
    assert "--kv-cache-dtype" not in command
    assert extension.kv == (None if name == "bf16" else name)
    assert extension.kv_lazy is (name != "bf16")
    assert extension.kv_ring == 64


def test_the_ring_is_no_larger_than_the_context(tiny_packed: Path, tiny_ple: Path) -> None:
    assert started(tiny_packed, tiny_ple, device="cpu", context=256, kv="int8ring_int4")[1].kv_ring == 256


def test_prefixes_get_state_slots_beyond_those_of_running_requests(tiny_packed: Path, tiny_ple: Path) -> None:
    with_cache, *_ = started(tiny_packed, tiny_ple, device="cpu", context=256, requests=2, prefix_cache=True)
    without, *_ = started(tiny_packed, tiny_ple, device="cpu", context=256, requests=2)
    one_by_one, *_ = started(
        tiny_packed, tiny_ple, device="cpu", context=256, requests=2, prefix_cache=True, overlap=False
    )
    assert with_cache[with_cache.index("--max-mamba-cache-size") + 1] == "14"
    assert one_by_one[one_by_one.index("--max-mamba-cache-size") + 1] == "12"
    assert "--disable-radix-cache" not in with_cache
    assert "--disable-radix-cache" in without
    assert "--max-mamba-cache-size" not in without


def test_memory_that_the_cache_takes_later_is_the_experts_until_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The release's shapes on a 24 GB card, through the real plan."""
    rows, row_bytes = 24_576, 1_305_600
    sizes = Sizes([], 0, 0, 0, 4 * GIB, 0, 0, 0.0, 0.0, row_bytes)
    shape = ModelShape.from_config(CONFIG)
    resolved = Resolved("cuda", 262_144, 1, 2048, "int8ring_int4", prefix_cache=False)
    later = sglang_plan._mapped_later(shape, resolved)
    assert later == 6_912 * 262_144 - 48 * 2**21  # less a chunk of each buffer, backed from the start
    assert (
        sglang_plan._mapped_later(shape, Resolved("cuda", 262_144, 1, 2048, "fp8", prefix_cache=False)) == 0
    )
    machine = machine_plan(
        CONFIG, sizes, gpu_total=23 * GIB, ram_total=32 * GIB, context=262_144, kv_format="int8ring_int4"
    )
    assert machine.gpu["KV cache"] == 262_144 * 7_308 + 262_144 * 768
    monkeypatch.setattr(sglang_plan, "_on_gpu", lambda *_: machine)
    weights = Weights(CONFIG, {}, row_bytes)
    plan = plan_for(weights, SglangSettings(), resolved, gpu=machine.gpu_total, ram=machine.ram_total)
    assert plan.device_rows - plan.fewest_device_rows == later // row_bytes
    assert plan.rows == rows
    assert (
        plan.reserve
        == sum(n for what, n in machine.gpu.items() if what not in ("resident expert rows", "dense weights"))
        - later
    )
    assert any(f"{plan.fewest_device_rows} once the whole context is in use" in line for line in plan.lines())


def plan_of(rows: dict[str, int]) -> Any:
    def make(resolved: Resolved) -> ServePlan:
        if resolved.kv not in rows:
            raise ResourceError(f"{resolved.kv} does not fit", where="GPU")
        n = rows[resolved.kv]
        return ServePlan({}, {}, {}, 1000, n, n, 16, 0, chunk=2048, kv=resolved.kv)

    return make


AUTO = Resolved("cuda", 1024, 1, 512, "auto", prefix_cache=False)


@pytest.mark.parametrize(
    ("rows", "picked"),
    [
        ({"bf16": 960, "int8": 980, "int8ring_int4": 995, "int4": 1000}, "bf16"),
        ({"bf16": 900, "int8": 950, "int8ring_int4": 995, "int4": 1000}, "int8"),
        ({"bf16": 100, "int8": 900, "int8ring_int4": 990, "int4": 1000}, "int8ring_int4"),
        ({"int8ring_int4": 100, "int4": 1000}, "int4"),
        ({"int4": 3}, "int4"),
        ({"bf16": 0, "int4": 0}, "bf16"),
    ],
)
def test_auto_takes_the_most_exact_format_that_leaves_the_experts_alone(
    rows: dict[str, int], picked: str
) -> None:
    resolved, plan = choose_kv(AUTO, plan_of(rows))
    assert (resolved.kv, plan.kv) == (picked, picked)


@pytest.mark.parametrize(
    ("context", "picked"), [(262_144, "int8ring_int4"), (131_072, "int8ring_int4"), (32_768, "bf16")]
)
def test_auto_on_a_24_gb_card(context: int, picked: str) -> None:
    """The release's shapes, 6 GiB of them dense, through the real plan."""
    row_bytes = 1_305_600
    groups = {Group.EXPERTS: 24_576 * row_bytes, Group.ATTENTION: 6 * GIB}
    asked = Resolved("cuda", context, 1, 2048, "auto", prefix_cache=True)
    resolved, plan = choose_kv(
        asked,
        lambda chosen: plan_for(
            Weights(CONFIG, groups, row_bytes),
            SglangSettings(),
            chosen,
            gpu=int(23.9 * GIB),
            ram=28 * GIB,
        ),
    )
    assert (resolved.kv, plan.kv) == (picked, picked)


def test_where_nothing_fits_auto_says_what_the_smallest_lacks() -> None:
    with pytest.raises(ResourceError, match="int4 does not fit"):
        choose_kv(AUTO, plan_of({}))


def test_a_format_that_was_asked_for_is_not_changed() -> None:
    resolved, _ = choose_kv(Resolved("cuda", 1024, 1, 512, "int8", prefix_cache=False), plan_of({"int8": 1}))
    assert resolved.kv == "int8"


@given(context=st.integers(64, 262_144), layers=st.just(12))
def test_more_exact_formats_take_no_less(context: int, layers: int) -> None:
    shape = ModelShape.from_config(CONFIG)
    size = {name: kv_bytes_per_token(shape, name, context=context) for name in BY_ERROR}
    assert size["bf16"] > size["int8"] > size["int4"]
    assert size["int8ring_int4"] > size["int4"]
    assert KvLayout.of(shape, "int4").layers == layers
