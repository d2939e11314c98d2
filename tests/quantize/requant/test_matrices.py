"""requant-int8 on the tiny model: what is packed, what is copied, what is reported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.packing import dequantize
from q38.model.names import Group, classify
from q38.quantize import requant_int8 as module
from q38.quantize import requant_scratch as scratch
from q38.quantize.requant_int8 import requant_int8
from q38.recipe.bits import check_resolution, plan_bits
from tests.quantize.requant.common import ATTENTION, TARGETS, digests, recipe, recipe_with_indexer


def test_each_matrix_is_what_numpy_makes_of_the_source(
    result: tuple[Path, dict[str, Any]], tiny_source: Path
) -> None:
    out, source = Checkpoint.open(result[0]), Checkpoint.open(tiny_source)
    targets = [n.removesuffix(".weight") for n in source.tensors if classify(n) in TARGETS]
    assert len(targets) == 8
    for name in targets:
        weight = source.read(f"{name}.weight").float().numpy()  # [N, K]
        n, k = weight.shape
        groups = weight.reshape(n, k // 128, 128)
        scales = (np.abs(groups).max(-1) / np.float32(127)).astype(np.float16)
        codes = np.clip(np.rint(groups / scales.astype(np.float32)[..., None]), -128, 127) + 128
        words = codes.astype(np.uint8).reshape(n, k // 4, 4).view("<i4")[..., 0].T  # [K/4, N]
        assert np.array_equal(out.read(f"{name}.qweight").numpy(), words)
        assert np.array_equal(out.read(f"{name}.scales").numpy(), scales.T)
        zeros = out.read(f"{name}.qzeros")
        assert zeros.shape == (k // 128, n // 4)
        assert (zeros == 0x7F7F7F7F).all()
        assert f"{name}.weight" not in out.tensors


def test_all_other_tensors_and_files_are_copied_unchanged(
    result: tuple[Path, dict[str, Any]], model: Path
) -> None:
    out, before = Checkpoint.open(result[0]), Checkpoint.open(model)
    kept = [n for n in before.tensors if classify(n) not in TARGETS]
    for name in kept:
        assert out.read_bytes(name) == before.read_bytes(name), name
        assert out.tensors[name].file.name == before.tensors[name].file.name
    assert len(out.tensors) == len(kept) + 3 * 8
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (result[0] / name).read_bytes() == (model / name).read_bytes()


def test_a_shard_without_a_target_is_the_same_file(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    requant_int8(model, out, source=tiny_source, recipe=recipe(groups=["lm_head"]))
    before, after = digests(model), digests(out)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"config.json", INDEX, "model-00001-of-00005.safetensors"}


def test_inputs_are_not_touched(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    before = digests(model), digests(tiny_source)
    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert (digests(model), digests(tiny_source)) == before


def test_the_config_names_every_matrix_exactly_and_both_engines_read_it_alike(
    result: tuple[Path, dict[str, Any]],
) -> None:
    out = Checkpoint.open(result[0])
    config = out.config["quantization_config"]
    entry = {"bits": 8, "group_size": 128, "sym": True, "data_type": "int"}
    extra = config["extra_config"]
    assert extra["lm_head"] == extra[f"{ATTENTION}.o_proj"] == extra[f"{ATTENTION}.qkv_proj"] == entry
    layer = "model.language_model.layers.0"
    for fused in ("linear_attn.in_proj_qkvz", "mlp.shared_expert.gate_up_proj"):
        assert extra[f"{layer}.{fused}"] == entry
    assert extra[f"{layer}.linear_attn.in_proj_ba"]["bits"] == 16
    assert not [key for key in extra if set(key) & set("*+?^$()[]{}|\\")]
    check_resolution(config, plan_bits(out.config, recipe()))


def test_facts_of_the_tuning_run_stay_in_the_config(result: tuple[Path, dict[str, Any]], model: Path) -> None:
    before = json.loads((model / "config.json").read_text())
    after = json.loads((result[0] / "config.json").read_text())
    assert after["quantization_config"]["iters"] == before["quantization_config"]["iters"]
    assert {**after, "quantization_config": 0} == {**before, "quantization_config": 0}


def test_the_report_gives_the_error_of_each_matrix(
    result: tuple[Path, dict[str, Any]], tiny_source: Path
) -> None:
    out, source = Checkpoint.open(result[0]), Checkpoint.open(tiny_source)
    assert [row["bits"] for row in result[1]["matrices"]] == [8] * 8
    assert result[1]["kept"] == []
    for row in result[1]["matrices"]:
        name = row["module"]
        parts = [out.read(f"{name}.{part}") for part in ("qweight", "qzeros", "scales")]
        weight = source.read(f"{name}.weight").double()
        error = float((dequantize(*parts, 8).double() - weight).norm() / weight.norm())
        assert row["relative_error"] == pytest.approx(error, rel=1e-5)
        assert 0.004 < error < 0.01  # normal weights, 128 to a group


def test_the_manifest_lists_every_file(result: tuple[Path, dict[str, Any]]) -> None:
    out, _ = result
    manifest = json.loads((out / MANIFEST).read_text())
    assert manifest["files"].keys() == digests(out).keys()
    for name, sha256 in digests(out).items():
        assert manifest["files"][name]["sha256"] == sha256


def test_transformers_computes_with_the_packed_matrices(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_ple: Path
) -> None:
    from q38.hf.load import load_model

    packed, reference = load_model(result[0], ple=tiny_ple), load_model(model, ple=tiny_ple)
    out = Checkpoint.open(result[0])
    for row in result[1]["matrices"]:
        parts = [out.read(f"{row['module']}.{part}") for part in ("qweight", "qzeros", "scales")]
        linear, matrix = reference.get_submodule(row["module"]), packed.get_submodule(row["module"])
        linear.weight.data.copy_(dequantize(*parts, 8).to(linear.weight.dtype))
        x = torch.randn(16, row["shape"][1], generator=torch.Generator().manual_seed(0)).bfloat16()
        with torch.no_grad():
            ours, theirs = matrix(x).float(), linear(x).float()
        assert "Quant" in type(matrix).__name__
        assert (ours - theirs).norm() < 0.005 * theirs.norm()  # bfloat16 keeps 8 bits
    ids = torch.arange(10, 74).view(1, -1)
    with torch.no_grad():
        ours, theirs = (m(input_ids=ids).logits.float().log_softmax(-1) for m in (packed, reference))
    # Rounding of activations flips a router here and there, so not equal to the last bit.
    assert (theirs.exp() * (theirs - ours)).sum(-1).mean() < 1e-3


def test_the_number_of_threads_and_the_chunks_do_not_change_a_byte(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scratch, "_SLICE", 2**12)
    for place in (scratch, module):
        monkeypatch.setattr(place, "COPY", 1000)
    one = requant_int8(model, tmp_path / "one", source=tiny_source, recipe=recipe(), threads=1)
    many = requant_int8(model, tmp_path / "many", source=tiny_source, recipe=recipe(), threads=7)
    assert digests(tmp_path / "one") == digests(tmp_path / "many") == digests(result[0])
    assert one == many == result[1]


def test_a_matrix_is_written_in_several_chunks_of_rows(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scratch, "_CHUNK", 256 * 100)  # lm_head in 21 chunks, the last of 48 rows
    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert digests(tmp_path / "out") == digests(result[0])


def test_the_fp8_release_gives_the_same_matrices(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_source_fp8: Path, tmp_path: Path
) -> None:
    requant_int8(model, tmp_path / "out", source=tiny_source_fp8, recipe=recipe())
    assert digests(tmp_path / "out") == digests(result[0])


def test_the_clip_search_of_the_recipe_is_used(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    found = requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(clip_search=True))
    for plain, searched in zip(result[1]["matrices"], found["matrices"], strict=True):
        assert searched["relative_error"] < plain["relative_error"]
        assert searched["clipped_fraction"] > plain["clipped_fraction"] == 0


def test_other_groups_can_be_selected(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    found = requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe_with_indexer())
    assert {classify(row["module"]) for row in found["matrices"]} == {Group.GDN_OUT, Group.INDEXER}
