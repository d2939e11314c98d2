"""q38 quantize, end to end on the tiny model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import CheckFailed, InputError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix, dequantize
from q38.hf.load import load_model
from q38.model.names import LAYERS, Group, classify
from q38.quantize import autoround
from q38.quantize.driver import last_block, quantize
from q38.quantize.rtn import round_to_nearest
from q38.recipe.schema import Recipe


def weight(checkpoint: Checkpoint, module: str, bits: int) -> torch.Tensor:
    return dequantize(*(checkpoint.read(f"{module}.{f}") for f in PackedMatrix._fields), bits)


def test_the_manifest_says_what_was_done(tiny_quantized: Path) -> None:
    manifest = json.loads((tiny_quantized / "MANIFEST.json").read_text())
    result = manifest["result"]
    assert result["complete"]
    assert result["bits"]["experts"] == {"2": 192}
    assert [block["block"] for block in result["blocks"]] == [0, 1, 2, 3]
    assert all(block["loss_after"] <= block["loss_before"] for block in result["blocks"])
    assert result["calibration"]["tokens_used"] == 8 * 64
    assert manifest["identity"]["text"] == result["calibration"]["text_sha256"]
    files = {path.name for path in tiny_quantized.iterdir()} - {"MANIFEST.json"}
    assert files == set(manifest["files"])
    shards = [record for name, record in manifest["files"].items() if name.endswith(".safetensors")]
    assert sum(record["tensors"] for record in shards) == result["tensors"]


def test_a_finished_run_is_up_to_date(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, fast: Recipe
) -> None:
    before = {path: path.stat().st_mtime_ns for path in tiny_quantized.iterdir()}
    assert quantize(tiny_source, tiny_quantized, fast, ple=tiny_ple)["complete"]
    assert {path: path.stat().st_mtime_ns for path in tiny_quantized.iterdir()} == before


def test_another_recipe_is_refused_by_name(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, vary: Callable[..., Recipe]
) -> None:
    with pytest.raises(InputError, match=r"begun with another quantize\.experts\.iters \(2, now 3\)"):
        quantize(tiny_source, tiny_quantized, vary(experts={"iters": 3}), ple=tiny_ple)


def test_a_dry_run_writes_nothing_and_tells_the_bytes_that_come(
    tiny_source: Path, tiny_quantized: Path, fast: Recipe, tmp_path: Path
) -> None:
    planned = quantize(tiny_source, tmp_path / "out", fast, device="cpu", dry_run=True)
    assert list(tmp_path.iterdir()) == []
    out = Checkpoint.open(tiny_quantized)
    assert planned["bytes"] == out.nbytes
    assert planned["tensors"] == len(out.tensors)
    cache = 8 * 64 * 4 * 256 * 4  # float32 on the CPU
    assert planned["calibration"]["cache_bytes"] == cache
    assert planned["calibration"]["scratch_bytes"] == 4 * cache
    assert planned["calibration"]["host_bytes"] > 3 * cache + 3 * 2**30


def test_a_dry_run_for_a_gpu_counts_half_the_bytes_a_value(
    tiny_source: Path, fast: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    planned = quantize(tiny_source, tmp_path / "out", fast, device="7", dry_run=True)  # another machine's
    assert planned["calibration"]["cache_bytes"] == 8 * 64 * 4 * 256 * 2


def test_an_fp8_source_gives_the_experts_of_the_bf16_source_up_to_the_rounding_of_fp8(
    tiny_source: Path,
    tiny_source_fp8: Path,
    tiny_ple: Path,
    tiny_quantized: Path,
    fast: Recipe,
    tmp_path: Path,
) -> None:
    quantize(tiny_source_fp8, tmp_path / "out", fast, ple=tiny_ple)
    from_bf16, from_fp8 = Checkpoint.open(tiny_quantized), Checkpoint.open(tmp_path / "out")
    for name in (f"{LAYERS}.{i}.mlp.experts.{i}.down_proj" for i in range(4)):
        a, b = weight(from_bf16, name, 2), weight(from_fp8, name, 2)
        assert (a - b).norm() / a.norm() < 0.35  # codes that flip; raw fp8 codes would be off by their scale
    ids = torch.randint(10, 1000, (2, 32), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = [
            load_model(path, ple=tiny_ple)(input_ids=ids).logits.float()
            for path in (tiny_source, tmp_path / "out")
        ]
    kl = torch.nn.functional.kl_div(
        logits[1].log_softmax(-1), logits[0].log_softmax(-1), log_target=True, reduction="none"
    )
    assert kl.sum(-1).mean() < 0.02


def test_rounding_alone_needs_no_calibration_and_packs_any_group(
    tiny_source: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    bits = {"experts": 2, "gdn_in": 8, "shared_expert": 4, "lm_head": 8, "mtp_experts": 2}
    recipe = vary(bits=bits, experts={"method": "rtn"}, mtp="keep", vision="keep")
    result = quantize(tiny_source, tmp_path / "out", recipe)
    assert result["calibration"] is None
    source, out = Checkpoint.open(tiny_source), Checkpoint.open(tmp_path / "out")
    fused = source.read(f"{LAYERS}.2.mlp.experts.gate_up_proj")  # [E, 2 * I, H]
    middle = fused.shape[1] // 2
    assert torch.equal(
        weight(out, f"{LAYERS}.2.mlp.experts.5.up_proj", 2),
        dequantize(*round_to_nearest(fused[5, middle:], 2, 128), 2),
    )
    assert torch.equal(
        weight(out, "lm_head", 8), dequantize(*round_to_nearest(source.read("lm_head.weight"), 8, 128), 8)
    )
    assert "mtp.layers.0.mlp.experts.0.up_proj.qweight" in out.tensors
    kept = [name for name in source.tensors if classify(name) in (Group.VISION, Group.MTP)]
    assert kept
    assert all(out.read_bytes(name) == source.read_bytes(name) for name in kept)
    assert load_model(
        tmp_path / "out", ple=None if (tmp_path / "ple").exists() else table(tiny_source, tmp_path)
    )


def table(source: Path, root: Path) -> Path:
    from q38.ple.split import split_ple

    split_ple(source, root / "ple")
    return root / "ple"


def test_a_trial_stops_after_its_blocks_and_the_full_run_goes_on(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, fast: Recipe, tmp_path: Path
) -> None:
    trial = quantize(tiny_source, tmp_path / "out", fast, ple=tiny_ple, blocks="0-1")
    assert not trial["complete"]
    assert [block["block"] for block in trial["blocks"]] == [0, 1]
    assert not (tmp_path / "out" / "MANIFEST.json").exists()
    assert quantize(tiny_source, tmp_path / "out", fast, ple=tiny_ple)["complete"]
    for file in tiny_quantized.glob("*.safetensors"):
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes()


@pytest.mark.parametrize(("text", "last"), [(None, 7), ("0", 0), ("0-3", 3), ("3", 3), ("7", 7)])
def test_ranges_of_blocks(text: str | None, last: int) -> None:
    assert last_block(text, 8) == last


@pytest.mark.parametrize(
    ("text", "message"),
    [("1-3", "starts at block 1"), ("0-8", "the last one is 7"), ("a", "no range"), ("3-", "no range")],
)
def test_ranges_that_make_no_sense_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        last_block(text, 8)


def test_a_source_without_its_table_is_refused(tiny_source: Path, fast: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"holds no ple\.json"):
        quantize(tiny_source, tmp_path / "out", fast, ple=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_missing_calibration_file_is_refused_before_anything_is_written(
    tiny_source: Path, tiny_ple: Path, fast: Recipe, tmp_path: Path
) -> None:
    calibration = fast.calibration.model_copy(update={"text": str(tmp_path / "absent.jsonl")})
    with pytest.raises(InputError, match=r"absent\.jsonl"):
        quantize(
            tiny_source, tmp_path / "out", fast.model_copy(update={"calibration": calibration}), ple=tiny_ple
        )
    assert not (tmp_path / "out").exists()


def test_a_truncated_shard_is_refused(
    tiny_source: Path, tiny_ple: Path, fast: Recipe, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_source, broken)
    shard = next(iter(sorted(broken.glob("*.safetensors"))))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(InputError, match="truncated"):
        quantize(broken, tmp_path / "out", fast, ple=tiny_ple)


def test_a_failure_inside_autoround_is_one_line_that_names_the_kept_log(
    tiny_source: Path, tiny_ple: Path, fast: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("shapes\ndiffer")

    monkeypatch.setattr(autoround, "build", fail)
    with pytest.raises(
        CheckFailed, match=r"\.q38/autoround\.log: AutoRound failed \(RuntimeError: shapes differ\)"
    ):
        quantize(tiny_source, tmp_path / "out", fast, ple=tiny_ple)
    assert (tmp_path / "out" / ".q38" / "autoround.log").exists()


def test_autoround_writes_nothing_to_the_terminal(
    tiny_source: Path, tiny_ple: Path, fast: Recipe, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quantize(tiny_source, tmp_path / "out", fast, ple=tiny_ple, blocks="0")
    out, err = capfd.readouterr()
    assert (out, err) == ("", "")
    assert "caching done" in (tmp_path / "out" / ".q38" / "autoround.log").read_text()
