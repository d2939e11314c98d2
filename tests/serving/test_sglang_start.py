"""What a start of the sglang engine is planned from: experts on the GPU by request, and files read ahead."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.serving import sglang_engine, sglang_plan
from q38.serving.engines import Launch, ServeOptions
from q38.serving.launch import read_ahead
from q38.serving.machine import Gpu
from q38.serving.sglang_engine import launch
from q38.serving.sglang_settings import SglangSettings

GIB, MIB = 2**30, 2**20


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Gpu("card", "12.0", 24 * GIB, 23 * GIB, "gen 5 x16", "1")
    monkeypatch.setattr(sglang_plan, "probe_gpus", lambda: (card,))
    monkeypatch.setattr(sglang_plan, "available_memory", lambda: 30 * GIB)


def started(model: Path, ple: Path, **given: Any) -> Launch:
    return launch(ServeOptions(model, ple, port=7, sglang=SglangSettings(context=1024, **given)))


def word(command: list[str], option: str) -> str:
    return command[command.index(option) + 1]


@pytest.mark.usefixtures("machine")
def test_experts_on_the_gpu_by_request(tiny_packed: Path, tiny_ple: Path) -> None:
    """16 experts in each of 4 layers; 16 slots stay free."""
    most, fewer = started(tiny_packed, tiny_ple).figures, started(tiny_packed, tiny_ple, resident=9).figures
    assert (most["device_rows"], fewer["device_rows"]) == (4 * 16 - 16, 4 * 9 - 16)
    row = most["device"]["resident expert rows"] // 64
    assert fewer["device"]["left"] - most["device"]["left"] == 7 * 4 * row
    assert fewer["host"]["pinned expert rows"] - most["host"]["pinned expert rows"] == 7 * 4 * row


@pytest.mark.usefixtures("machine")
def test_more_experts_than_there_are_or_than_fit_are_refused(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="17 of 16 experts"):
        started(tiny_packed, tiny_ple, resident=17)
    need = sum(
        n for what, n in started(tiny_packed, tiny_ple, kv="int4").figures["device"].items() if what != "left"
    )
    with pytest.raises(ResourceError, match=r"GPU is .* short"):
        started(tiny_packed, tiny_ple, resident=16, gpu_memory=need - MIB)
    with pytest.raises(ResourceError, match=r"host is .* short"):
        started(tiny_packed, tiny_ple, resident=0, ram=5 * GIB + MIB)


@pytest.mark.usefixtures("machine")
def test_memory_for_a_step_is_left_out_of_what_stays_allocated(tiny_packed: Path, tiny_ple: Path) -> None:
    found = started(tiny_packed, tiny_ple)
    device = found.figures["device"]
    working = device["prefill working set"] + device["CUDA graphs"]
    share = float(word(found.command, "--mem-fraction-static"))
    assert (1 - share) * (23 * GIB - device["CUDA context"]) == pytest.approx(working, abs=3 * MIB)


@pytest.mark.usefixtures("machine")
def test_routes_are_returned_on_request_only(tiny_packed: Path, tiny_ple: Path) -> None:
    assert "--enable-return-routed-experts" not in started(tiny_packed, tiny_ple).command
    assert "--enable-return-routed-experts" in started(tiny_packed, tiny_ple, return_routes=True).command


@pytest.mark.usefixtures("machine")
def test_steps_overlap_where_they_can_fetch_their_ngram_rows(
    tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = "--disable-overlap-schedule"
    assert flag not in started(tiny_packed, tiny_ple).command
    assert flag in started(tiny_packed, tiny_ple, overlap=False).command
    monkeypatch.setattr(sglang_engine, "obstacle", lambda directory: f"{directory} has one")
    assert flag in started(tiny_packed, tiny_ple).command
    assert flag not in started(tiny_packed, tiny_ple, overlap=True).command  # the start then says why not


@pytest.mark.usefixtures("machine")
def test_the_tensors_of_sglangs_own_loader_are_read_ahead(tiny_packed: Path, tiny_ple: Path) -> None:
    parts = started(tiny_packed, tiny_ple).read_ahead
    tensors = {(t.file, t.begin, t.end): t.name for t in Checkpoint.open(tiny_packed).tensors.values()}
    names = {tensors[part] for part in parts}
    assert "model.language_model.embed_tokens.weight" in names
    assert names and not any(".experts." in name for name in names)
    full_host = sglang_plan.ServePlan({}, {"left": MIB}, {}, 64, 48, 48, 16, 0, chunk=2048)
    assert sglang_engine._read_ahead(Checkpoint.open(tiny_packed), full_host) == []


def test_reading_ahead_never_fails_a_start(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x" * 10_000)
    read_ahead([(tmp_path / "f", 0, 5000), (tmp_path / "f", 6000, 99_999), (tmp_path / "absent", 0, 1)])
    assert threading.active_count() >= 1
