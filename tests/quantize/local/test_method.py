"""q38 quantize with the expert-local methods, end to end on the tiny model."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix, dequantize
from q38.model.names import LAYERS
from q38.quantize.driver import quantize
from q38.quantize.local.block import Batch, quantize_batch
from q38.quantize.local.method import LocalTuning
from q38.quantize.rtn import round_to_nearest
from q38.recipe.schema import Recipe
from tests.quantize.test_resume import SUICIDE, done

LOCAL = {"method": "expert-local", "iters": 4, "rows": 32, "min_tokens": 64}


@pytest.fixture(scope="module")
def recipe(vary: Callable[..., Recipe]) -> Recipe:
    return vary(experts=LOCAL)


@pytest.fixture(scope="module")
def finished(
    tiny_source: Path, tiny_ple: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("local") / "model"
    quantize(tiny_source, out, recipe, ple=tiny_ple)
    return out


def same_files(a: Path, b: Path) -> bool:
    return all(file.read_bytes() == (b / file.name).read_bytes() for file in a.glob("*.safetensors"))


def test_the_manifest_tells_errors_and_coverage(finished: Path) -> None:
    manifest = json.loads((finished / "MANIFEST.json").read_text())
    result = manifest["result"]
    assert result["complete"] and result["method"] == "expert-local"
    lists = json.loads((finished / "coverage.json").read_text())
    assert "coverage.json" in manifest["files"]
    for block in result["blocks"]:
        own = lists[str(block["block"])]
        assert sum(own["tokens"]) == 8 * 64 * 4  # each token has four experts
        assert own["fallback"] == block["fallback"] == [e for e, n in enumerate(own["tokens"]) if n < 64]
        assert block["coverage"]["max"] == max(own["tokens"])
        assert block["loss_after"] <= block["loss_before"]
        assert "tokens" not in block
    assert any(block["fallback"] for block in result["blocks"])
    config = json.loads((finished / "config.json").read_text())["quantization_config"]
    assert (config["expert_method"], config["iters"]) == ("expert-local", 4)


def test_what_is_no_expert_is_rounded_to_nearest(finished: Path, tiny_source: Path) -> None:
    out, source = Checkpoint.open(finished), Checkpoint.open(tiny_source)
    name = f"{LAYERS}.1.linear_attn.in_proj_qkv"
    packed = [out.read(f"{name}.{field}") for field in PackedMatrix._fields]
    wanted = round_to_nearest(source.read(f"{name}.weight"), 8, 128)
    assert all(torch.equal(a, b) for a, b in zip(packed, wanted, strict=True))


def test_experts_are_not(finished: Path, tiny_source: Path) -> None:
    out, source = Checkpoint.open(finished), Checkpoint.open(tiny_source)
    name = f"{LAYERS}.1.mlp.experts.3.down_proj"
    ours = dequantize(*(out.read(f"{name}.{field}") for field in PackedMatrix._fields), 2)
    weight = source.read(f"{LAYERS}.1.mlp.experts.down_proj")[3].float()
    theirs = dequantize(*round_to_nearest(weight, 2, 128), 2)
    assert not torch.equal(ours, theirs)
    assert (ours - weight).norm() < (theirs - weight).norm()  # its scales were searched


@pytest.mark.parametrize("method", ["expert-local", "expert-local-gsq"])
def test_killed_inside_a_batch_and_inside_the_activations_it_goes_on_bit_for_bit(
    method: str,
    tiny_source: Path,
    tiny_ple: Path,
    vary: Callable[..., Recipe],
    finished: Path,
    tmp_path: Path,
) -> None:
    recipe = vary(experts={**LOCAL, "method": method})
    if method != "expert-local":
        finished = tmp_path / "uninterrupted"
        quantize(tiny_source, finished, recipe, ple=tiny_ple)
    out, file = tmp_path / "out", tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe.to_dict()))
    arguments = ["quantize", str(tiny_source), "-o", str(out), "-r", str(file), "--ple", str(tiny_ple)]
    for place, nth in (
        ("experts-1-1", 3),
        ("activations-2", 4),
    ):  # the second batch of block 1, then its outputs
        run = subprocess.run(
            [sys.executable, "-c", SUICIDE, place, str(nth), *arguments], capture_output=True, timeout=240
        )
        assert run.returncode == -signal.SIGKILL, run.stderr.decode()
        assert done(out) == ["block 0"]
        assert (out / ".q38" / "experts-1-0.safetensors").exists()
    assert quantize(tiny_source, out, recipe, ple=tiny_ple)["complete"]
    assert same_files(finished, out)
    assert (out / "coverage.json").read_text() == (finished / "coverage.json").read_text()
    assert not (out / ".q38").exists()


def test_two_devices_write_the_bytes_of_one(
    tiny_source: Path,
    tiny_ple: Path,
    recipe: Recipe,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: set[str] = set()
    sizes: list[int] = []
    begin = LocalTuning.__init__

    def split(self: LocalTuning, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        self._devices = [torch.device("cpu")] * 2

    def watched(block: int, batch: Batch, *args: Any) -> Any:
        threads.add(threading.current_thread().name)
        sizes.append(len(batch.experts))
        return quantize_batch(block, batch, *args)

    monkeypatch.setattr(LocalTuning, "__init__", split)
    monkeypatch.setattr("q38.quantize.local.block.quantize_batch", watched)
    quantize(tiny_source, tmp_path / "out", recipe, ple=tiny_ple)
    assert len(threads) > 1
    assert max(sizes) <= 16 // 2  # though memory holds all 16 experts at once
    assert same_files(finished, tmp_path / "out")


@pytest.mark.parametrize("method", ["opt-rtn", "expert-local-gsq"])
def test_the_other_methods_write_the_same_format(
    method: str,
    tiny_source: Path,
    tiny_ple: Path,
    vary: Callable[..., Recipe],
    finished: Path,
    tmp_path: Path,
) -> None:
    recipe = vary(experts={**LOCAL, "method": method, "iters": 1})
    result = quantize(tiny_source, tmp_path / "out", recipe, ple=tiny_ple, blocks="0")
    assert [block["block"] for block in result["blocks"]] == [0]
    assert ("loss_after" in result["blocks"][0]) == (method == "expert-local-gsq")
    ours, theirs = (path / "model-00002-of-00005.safetensors" for path in (tmp_path / "out", finished))
    assert ours.stat().st_size == theirs.stat().st_size and ours.read_bytes() != theirs.read_bytes()
    shutil.rmtree(tmp_path / "out")


def test_a_changed_key_is_refused_by_name(
    tiny_source: Path, tiny_ple: Path, vary: Callable[..., Recipe], finished: Path
) -> None:
    with pytest.raises(Exception, match=r"begun with another quantize\.experts\.rows \(32, now 16\)"):
        quantize(tiny_source, finished, vary(experts={**LOCAL, "rows": 16}), ple=tiny_ple)


def test_an_fp8_source_gives_nearly_the_same_experts(
    tiny_source_fp8: Path, tiny_ple: Path, recipe: Recipe, finished: Path, tmp_path: Path
) -> None:
    quantize(tiny_source_fp8, tmp_path / "out", recipe, ple=tiny_ple, blocks="0")
    name = f"{LAYERS}.0.mlp.experts.2.up_proj"
    a, b = (
        dequantize(*(_read(path, f"{name}.{field}") for field in PackedMatrix._fields), 2)
        for path in (finished, tmp_path / "out")
    )
    assert (a - b).norm() < 0.35 * a.norm()


def _read(path: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(str(path / "model-00002-of-00005.safetensors"), "pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
        return tensor
