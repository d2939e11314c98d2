"""The tuner's job: what it keeps, how it resumes. The timing itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.kernels import tune as module
from q38.kernels.configs import Tuned, load
from q38.kernels.tune import Workload, candidates, entries_of, tune
from q38.measure.kernels import plan_tuning, read_sizes
from q38.residency.layout import ExpertLayout

BENCH = module.Bench  # tests replace it in the module
WORK = Workload(ExpertLayout(2560, 640), 512, 10, ((2560, 512, 128),))


class Clock:
    """A stand-in for Bench: the n-th candidate of a unit takes the n-th time; the run dies on demand."""

    def __init__(self, times: list[float | None], die_after: int = 10**9) -> None:
        self.times, self.die_after, self.units = times, die_after, 0

    def __call__(self, workload: Workload) -> Any:
        bench = BENCH.__new__(BENCH)
        bench.workload = workload

        def measure(config: Any, shape: dict[str, int], tokens: int) -> dict[str, Any]:
            self.calls += 1
            return {"us": self.times[(self.calls - 1) % len(self.times)], "error": 0.0}

        def run(kernel: str, shape: dict[str, int], tokens: int) -> dict[str, Any]:
            if self.units == self.die_after:
                raise KeyboardInterrupt
            self.units += 1
            self.calls = 0
            return BENCH.run(bench, kernel, shape, tokens)

        shadow = type("Shadow", (), {"run": staticmethod(run)})()
        bench._decode = bench._prefill = bench._int8 = measure  # type: ignore[method-assign,assignment]
        return shadow


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
    monkeypatch.setattr(module, "require_gpu", lambda: ("NVIDIA Test", "3.6.0"))
    return monkeypatch


def test_without_a_gpu_the_tuner_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="no CUDA GPU"):
        tune(WORK, tmp_path / "out", identity={})
    assert not (tmp_path / "out").exists()


def test_only_wins_above_two_percent_are_kept(tmp_path: Path, with_gpu: pytest.MonkeyPatch) -> None:
    with_gpu.setattr(module, "Bench", Clock([100.0, 99.0, None, 98.5]))
    report = tune(WORK, tmp_path / "a", identity={}, kernels=("int8",))
    assert all(r["best"] is None for r in report["results"])
    with_gpu.setattr(module, "Bench", Clock([100.0, 97.0, None, 90.0, 95.0]))
    tune(WORK, tmp_path / "b", identity={}, kernels=("int8",))
    entries = load(tmp_path / "b" / "NVIDIA_Test.json").entries
    assert [(e.us, e.default_us) for e in entries] == [(90.0, 100.0)] * 3


def test_a_count_without_a_win_keeps_its_default_beside_one_that_has_one() -> None:
    def unit(tokens: int, best: float | None, kernel: str = "decode") -> dict[str, Any]:
        return {
            "kernel": kernel, "shape": {"hidden": 8}, "tokens": tokens,
            "default": {"config": {"tiles13": 1}, "us": 10.0},
            "best": best and {"config": {"tiles13": 2}, "us": best},
        }  # fmt: skip

    entries = entries_of([unit(1, None), unit(16, 8.0), unit(1, None, "int8")])
    assert [(e.kernel, e.tokens, e.config["tiles13"]) for e in entries] == [
        ("decode", 1, 1),
        ("decode", 16, 2),
    ]
    tuned = Tuned("GPU", "3.6.0", "trace", entries)
    nearest = tuned.find("decode", {"hidden": 8}, 2)
    assert nearest is not None and nearest.config == {"tiles13": 1}


def test_a_default_that_does_not_run_gives_way_to_any_candidate(
    tmp_path: Path, with_gpu: pytest.MonkeyPatch
) -> None:
    with_gpu.setattr(module, "Bench", Clock([None, 50.0, 60.0]))
    report = tune(WORK, tmp_path / "out", identity={}, kernels=("int8",))
    assert {r["best"]["us"] for r in report["results"]} == {50.0}


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path, with_gpu: pytest.MonkeyPatch) -> None:
    with_gpu.setattr(module, "Bench", Clock([100.0, 90.0], die_after=2))
    with pytest.raises(KeyboardInterrupt):
        tune(WORK, tmp_path, identity={}, kernels=("int8",))
    rest = Clock([100.0, 80.0])
    with_gpu.setattr(module, "Bench", rest)
    report = tune(WORK, tmp_path, identity={}, kernels=("int8",))
    assert rest.units == 1
    assert [r["best"]["us"] for r in report["results"]] == [90.0, 90.0, 80.0]
    assert tune(WORK, tmp_path, identity={}, kernels=("int8",)) == report


def test_another_model_is_refused_in_the_same_directory(tmp_path: Path, with_gpu: pytest.MonkeyPatch) -> None:
    with_gpu.setattr(module, "Bench", Clock([100.0, 90.0]))
    tune(WORK, tmp_path, identity={"model": "a"}, kernels=("int8",))
    with pytest.raises(InputError, match="model"):
        tune(WORK, tmp_path, identity={"model": "b"}, kernels=("int8",))


@pytest.mark.parametrize("kernel", ["decode", "prefill", "int8"])
def test_candidates_are_distinct_and_begin_with_the_default(kernel: str) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
    for unit, shape, tokens in WORK.units:
        if unit == kernel:
            found = candidates(kernel, WORK, shape, tokens)
            assert len(set(found)) == len(found) > 3


def test_the_sizes_of_the_release_are_the_default() -> None:
    sizes = read_sizes(None)
    assert ExpertLayout(sizes.hidden_size, sizes.moe_intermediate_size).row_bytes == 1_305_600
    assert sizes.int8 == ((10240, 320, 128), (320, 10240, 64), (2560, 512, 128))


def test_sizes_and_group_come_from_a_models_config(tiny_source: Path) -> None:
    config = json.loads((tiny_source / "config.json").read_text())
    assert read_sizes(tiny_source).hidden_size == config["text_config"]["hidden_size"]


def test_an_unknown_kernel_is_refused() -> None:
    with pytest.raises(InputError, match="'moe'"):
        plan_tuning(None, trace=None, kernels=("moe",), layers=2)
