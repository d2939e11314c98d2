"""What the methods that tune share: where they run, and what they tell of time and memory."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.base.progress import SILENT
from q38.quantize.calibrated import Meter, report
from q38.quantize.devices import device_map
from q38.quantize.driver import quantize
from q38.recipe.schema import Recipe


def test_auto_is_all_gpus_or_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for count, wanted in ((0, "cpu"), (1, "0"), (3, "0,1,2")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert device_map("auto") == wanted
        assert device_map("cpu") == "cpu"


def test_a_device_that_is_none_and_a_gpu_that_is_not_there_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_map("1,0") == "1,0"
    with pytest.raises(InputError, match=r"--device: 'cuda:0' is no device\. Write auto, cpu, 0 or 0,1"):
        device_map("cuda:0")
    with pytest.raises(ResourceError, match="GPU 2 is not there, this machine has 2"):
        device_map("0,2")


def test_a_block_is_told_its_own_peak_not_that_of_an_earlier_one() -> None:
    meter = Meter(2, "cpu")
    with mmap.mmap(-1, 2**26) as large:  # its own mapping: an allocator might keep the pages
        for page in range(0, len(large), mmap.PAGESIZE):
            large[page] = 1
        first = meter.lap()
    meter.restart()
    second = meter.lap()
    assert first["host_peak"] - second["host_peak"] > 2**25
    assert first["seconds"] >= 0 and "device_peak" not in first


def test_the_rest_takes_as_long_as_the_mean_of_what_was_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 14.0, 20.0])
    monkeypatch.setattr("q38.quantize.calibrated.time.monotonic", lambda: next(now))
    meter = Meter(5, "cpu")
    assert meter.lap()["seconds"] == 4.0 and meter.eta == 4 * 4.0
    assert meter.lap()["seconds"] == 6.0 and meter.eta == 3 * 5.0


def test_the_line_of_a_block_has_losses_peaks_and_times() -> None:
    outcome = {
        "loss_before": 0.25, "loss_after": 0.125, "seconds": 61.0, "host_peak": 3 * 2**30, "device_peak": 2**31,
        "coverage": {"min": 3, "median": 40.0, "max": 90}, "fallback": [7],
    }  # fmt: skip
    line = report(1, 48, outcome, 3600.0)
    for part in ("block 2 of 48", "0.25 -> 0.125", "3 / 40 / 90", "1 experts by searched scale", "3.0 GiB of memory",
                 "2.0 GiB on the GPU", "ETA"):  # fmt: skip
        assert part in line


@pytest.mark.parametrize("method", ["autoround", "opt-rtn"])
def test_a_run_says_the_bytes_of_its_caches_before_the_first_block_and_the_peak_of_each(
    method: str, tiny_source: Path, tiny_ple: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    said: list[str] = []

    class Said(type(SILENT)):  # type: ignore[misc]
        def say(self, message: str) -> None:
            said.append(message)

    recipe = vary(experts={"method": method, "iters": 1})
    result = quantize(
        tiny_source, tmp_path / "out", recipe, ple=tiny_ple, blocks="0", device="cpu", progress=Said()
    )
    before, block = (
        next(i for i, line in enumerate(said) if line.startswith(s)) for s in ("calibration", "block")
    )
    assert before < block
    assert "2.0 MiB a cache of block inputs, 3.0 GiB of host memory at most" in said[before]
    chains = 2 if method == "autoround" else 1
    kept = (tmp_path / "out" / ".q38" / "activations-1.safetensors").stat().st_size
    assert 0 < kept - chains * 2 * 2**20 < 2**13  # the header
    assert result["blocks"][0]["host_peak"] > 2**28
    assert "of memory" in said[block]
    assert json.loads(json.dumps(result)) == result
