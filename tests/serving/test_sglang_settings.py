"""The sglang engine's settings: conflicts, defaults, and the command line made of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint, read_json
from q38.serving import sglang_engine, sglang_plan
from q38.serving.engines import ServeOptions
from q38.serving.machine import Gpu
from q38.serving.sglang_engine import launch
from q38.serving.sglang_plan import make_plan
from q38.serving.sglang_settings import SglangSettings, refuse_conflicts, resolve
from q38.sglang_ext.options import ExtensionOptions

GIB = 2**30


def conflict(on: str = "cuda", engine: str = "sglang", **given: Any) -> str:
    with pytest.raises(InputError) as refused:
        refuse_conflicts(SglangSettings(**given), engine=engine, device=on)
    return str(refused.value)


@pytest.mark.parametrize(
    "given",
    [
        {"device": "cpu"},
        {"gpu_memory": GIB},
        {"ram": GIB},
        {"context": 9},
        {"requests": 2},
        {"chunk": 64},
        {"kv": "fp8"},
        {"profile": Path("p")},
        {"prefix_cache": False},
        {"resident": 3},
        {"return_routes": True},
        {"tp": 1},
        {"overlap": False},
        {"int8_mixes": True},
        {"check_finite": True},
    ],
)
def test_the_transformers_engine_has_none_of_them(given: dict[str, Any]) -> None:
    option = f"--{next(iter(given)).replace('_', '-')}"
    assert option in conflict(engine="transformers", **given)
    refuse_conflicts(SglangSettings(), engine="transformers", device="cpu")


@pytest.mark.parametrize(
    ("given", "option"),
    [
        ({"gpu_memory": GIB}, "--gpu-memory"),
        ({"resident": 3}, "--resident"),
    ],
)
def test_what_needs_a_gpu_contradicts_the_cpu(given: dict[str, Any], option: str) -> None:
    text = conflict(on="cpu", **given)
    assert option in text
    assert "--device cpu" in text
    refuse_conflicts(SglangSettings(**given), engine="sglang", device="cuda")


@pytest.mark.parametrize("name", ["gpu_memory", "ram", "context", "requests", "chunk", "kv_ring"])
@pytest.mark.parametrize("value", [0, -1])
def test_nothing_is_less_than_one(name: str, value: int) -> None:
    assert "not positive" in conflict(**{name: value})


def test_fewer_experts_on_the_gpu_than_none() -> None:
    assert "-1 is negative" in conflict(resident=-1)
    refuse_conflicts(SglangSettings(resident=0), engine="sglang", device="cuda")


def test_several_gpus_are_refused_with_the_reason() -> None:
    assert "the memory of one GPU" in conflict(tp=2)
    refuse_conflicts(SglangSettings(tp=1), engine="sglang", device="cuda")


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="cuda, cpu"):
        refuse_conflicts(SglangSettings(device="tpu"), engine="sglang", device="tpu")
    assert "bf16, fp8, int8, int8ring_int4, int4, auto" in conflict(kv="int5")


@pytest.fixture(scope="module")
def config(tiny_packed: Path) -> dict[str, Any]:
    return read_json(tiny_packed / "config.json")


def test_the_context_is_the_models_and_no_more(config: dict[str, Any]) -> None:
    assert resolve(SglangSettings(), config, where="c").context == 32768
    with pytest.raises(InputError, match="32769"):
        resolve(SglangSettings(context=32769), config, where="c")


def test_a_chunk_beyond_the_context_is_refused_and_the_default_shrinks(config: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="--context 100"):
        resolve(SglangSettings(context=100, chunk=101), config, where="c")
    assert resolve(SglangSettings(context=100), config, where="c").chunk == 100


@pytest.mark.parametrize(("device", "kv"), [("cpu", "bf16"), ("cuda", "auto"), (None, "auto")])
def test_the_cache_format_follows_the_device(config: dict[str, Any], device: str | None, kv: str) -> None:
    assert resolve(SglangSettings(device=device), config, where="c").kv == kv


@pytest.mark.parametrize(
    ("device", "requests", "given", "kept"),
    [
        ("cpu", None, None, False),
        (None, None, None, True),
        (None, 2, None, False),
        (None, None, False, False),
        ("cpu", 2, True, True),
    ],
)
def test_prefixes_are_kept_on_a_gpu_that_runs_one_request(
    config: dict[str, Any], device: str | None, requests: int | None, given: bool | None, kept: bool
) -> None:
    settings = SglangSettings(device=device, requests=requests, prefix_cache=given)
    assert resolve(settings, config, where="c").prefix_cache is kept


def started(tiny_packed: Path, tiny_ple: Path, **given: Any) -> tuple[list[str], dict[str, str], list[str]]:
    options = ServeOptions(tiny_packed, tiny_ple, port=7, sglang=SglangSettings(**given))
    found = launch(options)
    return found.command, found.environment, found.plan


def value(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


def test_on_a_cpu_everything_runs_through_references(tiny_packed: Path, tiny_ple: Path) -> None:
    command, environment, plan = started(tiny_packed, tiny_ple, device="cpu", context=256, requests=3)
    assert value(command, "--device") == "cpu"
    assert value(command, "--max-total-tokens") == str(
        3 * (256 + 2 * 64)
    )  # SGLang keeps a page and more back
    assert environment["SGLANG_PLATFORM"] == "q38cpu"
    assert "--disable-cuda-graph" in command
    options = ExtensionOptions.from_json(environment["Q38_SGLANG"])
    assert options.model == str(tiny_packed.resolve())
    assert options.ple == str(tiny_ple.resolve())
    assert any(line.startswith("host:") for line in plan)


def test_a_checkpoint_that_does_not_say_so_is_served_without_vision_by_a_flag(
    tiny_packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    assert "--language-model-only" not in started(tiny_packed, tiny_ple, device="cpu")[0]
    for file in tiny_packed.iterdir():
        (tmp_path / file.name).symlink_to(file)
    values = read_json(tiny_packed / "config.json")
    del values["language_model_only"]
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert "--language-model-only" in started(tmp_path, tiny_ple, device="cpu")[0]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("card", "12.0", 24 * GIB, 23 * GIB, "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 30 * GIB)


@pytest.mark.usefixtures("gpu")
def test_on_a_gpu_decode_keeps_its_graphs_and_the_plan_says_what_lies_where(
    tiny_packed: Path, tiny_ple: Path
) -> None:
    command, environment, plan = started(tiny_packed, tiny_ple, context=1024)
    assert "--disable-cuda-graph" not in command
    assert value(command, "--cuda-graph-backend-prefill") == "disabled"
    assert value(command, "--kv-cache-dtype") == "bfloat16"
    assert "SGLANG_PLATFORM" not in environment
    told = ["GPU", "host", "disk", "KV cache", "expert rows", "routing profile"]
    assert [line.split(":")[0] for line in plan] == told


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("given", "where"), [({"gpu_memory": GIB}, "GPU"), ({"ram": GIB}, "host")])
def test_what_cannot_fit_is_refused_with_the_shortfall(
    tiny_packed: Path, tiny_ple: Path, given: dict[str, int], where: str
) -> None:
    with pytest.raises(ResourceError, match=rf"{where}.*short"):
        started(tiny_packed, tiny_ple, **given)


def reads_early(tiny_packed: Path, tiny_ple: Path, **given: Any) -> bool:
    environment = started(tiny_packed, tiny_ple, context=1024, **given)[1]
    return ExtensionOptions.from_json(environment["Q38_SGLANG"]).early_rows


@pytest.mark.usefixtures("gpu")
def test_rows_are_read_early_on_a_gpu_where_the_reader_has_memory(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reads_early(tiny_packed, tiny_ple)
    assert not reads_early(tiny_packed, tiny_ple, early_rows=False)
    assert not reads_early(tiny_packed, tiny_ple, device="cpu")
    assert reads_early(tiny_packed, tiny_ple, device="cpu", early_rows=True)
    options = ServeOptions(tiny_packed, tiny_ple, port=7, sglang=SglangSettings(context=1024))
    host = launch(options).figures["host"]
    spare = host["left"] + host["n-gram page cache"]
    monkeypatch.setattr(sglang_engine, "_READER", spare)
    assert reads_early(tiny_packed, tiny_ple)
    monkeypatch.setattr(sglang_engine, "_READER", spare + 1)
    assert not reads_early(tiny_packed, tiny_ple)


def test_without_a_gpu_there_is_no_plan_for_one(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_plan, "probe_gpus", tuple)
    with pytest.raises(ResourceError, match="no CUDA GPU"):
        started(tiny_packed, tiny_ple)


def test_a_cpu_without_the_memory_is_refused(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: GIB)
    with pytest.raises(ResourceError, match="short"):
        started(tiny_packed, tiny_ple, device="cpu")


def test_experts_of_another_width_are_refused(tiny_source: Path, tiny_ple: Path) -> None:
    with pytest.raises(InputError, match="16 bits"):
        started(tiny_source, tiny_ple, device="cpu")


def test_a_profile_that_is_not_there_is_refused(tiny_packed: Path, tiny_ple: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="build-placement"):
        started(tiny_packed, tiny_ple, device="cpu", profile=tmp_path / "none")


def test_the_plan_counts_every_row_once(tiny_packed: Path, tiny_ple: Path) -> None:
    checkpoint = Checkpoint.open(tiny_packed)
    settings = SglangSettings(device="cpu", context=256)
    resolved = resolve(settings, checkpoint.config, where="c")
    plan = make_plan(checkpoint, settings, resolved, tiny_ple)
    assert plan.rows == plan.device_rows == 64
    assert (
        plan.disk["n-gram table"]
        == (tiny_ple / json.loads((tiny_ple / "ple.json").read_text())["file"]).stat().st_size
    )


def test_a_state_directory_too_deep_for_a_socket_is_refused(
    tiny_packed: Path, tiny_ple: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("Q38_STATE_DIR", str(tmp_path / ("d" * 100)))
    with pytest.raises(InputError, match="Q38_STATE_DIR"):
        started(tiny_packed, tiny_ple, device="cpu")
