"""Which kernels and geometries a server takes for its experts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.kernels import configs
from q38.kernels.configs import Entry, Tuned
from q38.kernels.moe_prefill_cuda import HopperConfig
from q38.residency.layout import ExpertLayout
from q38.sglang_ext import expert_kernels, residency, steps
from q38.sglang_ext.expert_kernels import decode_configs
from q38.sglang_ext.gate import Gate
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows

LAYOUT, CUDA = ExpertLayout(2560, 640), torch.device("cuda")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A GPU by the name of one with a shipped file, and the directory of its user's own."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "NVIDIA H200")
    monkeypatch.setenv("Q38_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(expert_kernels, "_prefill_configs", {})
    configs.in_use.cache_clear()
    yield configs.own_directory()
    configs.in_use.cache_clear()


@pytest.mark.usefixtures("device")
def test_decode_takes_the_tuned_geometry_of_the_nearest_token_count() -> None:
    found = decode_configs(LAYOUT, 10, CUDA)
    assert sorted(found) == list(range(1, 17))
    assert (found[1].ctas13, found[1].depth2) == (3, 3)  # assets/triton/NVIDIA_H200.json
    assert found[16].tiles13 == found[13].tiles13 == 2
    assert decode_configs(LAYOUT, 8, CUDA) == {}
    assert decode_configs(ExpertLayout(1024, 640), 10, CUDA) == {}
    assert decode_configs(LAYOUT, 10, torch.device("cpu")) == {}


def test_prefill_takes_what_the_user_tuned(device: Path, tiny_packed: Path) -> None:
    rows = ExpertRows(Checkpoint.open(tiny_packed), ExtensionOptions(str(tiny_packed)), torch.device("cpu"))
    try:
        assert expert_kernels._prefill_config(rows, 10, 4096, CUDA) is None
        shape = {
            "hidden": rows.layout.hidden, "intermediate": rows.layout.intermediate, "group": rows.layout.group, "top_k": 10,
        }  # fmt: skip
        fields = {"block_tokens": 96, "warpgroups": 2, "ctas": 2, "tiles13": 1, "tiles2": 1, "stages": 3}
        tuned = Tuned("NVIDIA H200", "3", "trace", (Entry("prefill", shape, 4096, fields, 1.0, 2.0),))
        device.mkdir()
        (device / configs.file_name("NVIDIA H200")).write_text(json.dumps(tuned.to_dict()))
        configs.in_use.cache_clear()
        assert expert_kernels._prefill_config(rows, 10, 4096, CUDA) is None  # looked up once
        assert expert_kernels._prefill_config(rows, 10, 4095, CUDA) == HopperConfig(96, 2, 2, 1, 1, 3)
    finally:
        rows.cache.close()


def test_rows_move_before_a_decode_step_and_copies_of_a_prompt_step_start_before_the_model_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    happened: list[object] = []
    stored = SimpleNamespace(
        gate=Gate(),
        others={"kv": dict},
        follow_stream=lambda _s: None,
        staging=SimpleNamespace(begin=lambda tokens: happened.append(f"copies for {tokens}")),
        adapt=lambda tokens: happened.append(f"moves before {tokens}"),
    )
    monkeypatch.setattr(residency, "loaded", lambda: stored)
    scheduler = SimpleNamespace(enable_overlap=False)
    for mode in (True, False):
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda m=mode: m),
            extend_num_tokens=300,
            batch_size=lambda: 2,
        )
        steps.run_batch(lambda _self, _batch: happened.append("step"), scheduler, batch)
    assert happened == ["copies for 300", "step", "moves before 2", "step"]


def test_without_a_gpu_nothing_is_staged(tiny_packed: Path) -> None:
    options = ExtensionOptions(str(tiny_packed), staging=24)
    rows = ExpertRows(Checkpoint.open(tiny_packed), options, torch.device("cpu"))
    assert rows.staging is None
    rows.cache.close()
