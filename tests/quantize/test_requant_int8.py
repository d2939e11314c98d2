"""requant-int8 on the tiny model: what is packed, what is copied, what is refused, and kill -9."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.packing import dequantize
from q38.checkpoint.writer import write_safetensors
from q38.model.names import Group, classify
from q38.quantize import requant_int8 as module
from q38.quantize.driver import quantize
from q38.quantize.requant_int8 import requant_int8
from q38.recipe.bits import check_resolution, plan_bits
from q38.recipe.schema import Recipe, parse_recipe
from tests.checkpoint.disks import small_disk
from tests.inspection.broken import clone, edit_json, edit_tensor

BASE: dict[str, Any] = {
    "schema": "q38.recipe/1",
    "name": "test",
    "source": {"synth": "tiny"},
    "quantize": {"bits": {"experts": 2, "gdn_in": 8, "shared_expert": 8}, "experts": {"method": "rtn"}},
}
TARGETS = (Group.GDN_OUT, Group.ATTENTION, Group.LM_HEAD)
ATTENTION = "model.language_model.layers.3.self_attn"


def recipe(**requant: Any) -> Recipe:
    return parse_recipe({**BASE, "requant_int8": requant})


def digests(directory: Path) -> dict[str, str]:
    """File name -> sha256; the manifest, which holds a date, left out."""
    return {
        str(p.relative_to(directory)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.rglob("*"))
        if p.is_file() and p.name != MANIFEST
    }


def rewrite(directory: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change one tensor of a checkpoint in place."""
    checkpoint = Checkpoint.open(directory)
    file = checkpoint.info(name).file
    tensors = {n: checkpoint.read(n) for n in checkpoint.headers[file.name].tensors}
    tensors[name] = change(tensors[name])
    write_safetensors(file, tensors)


@pytest.fixture(scope="module")
def model(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("rtn") / "model"
    quantize(tiny_source, out, recipe())
    return out


@pytest.fixture(scope="module")
def result(
    model: Path, tiny_source: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("int8") / "model"
    return out, requant_int8(model, out, source=tiny_source, recipe=recipe())


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
    monkeypatch.setattr(module, "_SLICE", 2**12)
    monkeypatch.setattr(module, "_COPY", 1000)
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
    monkeypatch.setattr(module, "_CHUNK", 256 * 100)  # lm_head in 21 chunks, the last of 48 rows
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
    found = requant_int8(
        model, tmp_path / "out", source=tiny_source, recipe=recipe(groups=["gdn_out", "indexer"])
    )
    assert {classify(row["module"]) for row in found["matrices"]} == {Group.GDN_OUT, Group.INDEXER}


def spiky(weight: torch.Tensor) -> torch.Tensor:
    """One large weight per group, the others half a step: the worst case of a shared scale."""
    result = torch.full_like(weight, 0.0039)
    result[:, ::128] = 1.0
    return result


@pytest.fixture(scope="module")
def spiky_pair(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source and model whose k_proj INT8 cannot hold."""
    root = tmp_path_factory.mktemp("spiky")
    shutil.copytree(tiny_source, root / "source")
    rewrite(root / "source", f"{ATTENTION}.k_proj.weight", spiky)
    quantize(root / "source", root / "model", recipe())
    return root / "source", root / "model"


def test_a_matrix_that_fails_the_gate_stays_in_16_bit_with_its_fused_partners(
    spiky_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    source, model = spiky_pair
    found = requant_int8(model, tmp_path / "out", source=source, recipe=recipe())
    out, before = Checkpoint.open(tmp_path / "out"), Checkpoint.open(model)
    kept = [f"{ATTENTION}.{p}_proj" for p in "kqv"]
    assert found["kept"] == kept
    for name in kept:
        assert out.read_bytes(f"{name}.weight") == before.read_bytes(f"{name}.weight")
        assert f"{name}.qweight" not in out.tensors
    assert f"{ATTENTION}.o_proj.qweight" in out.tensors
    bits = plan_bits(out.config, recipe()) | dict.fromkeys(kept, 16)
    check_resolution(out.config["quantization_config"], bits)
    reasons = {row["module"]: row["kept"] for row in found["matrices"]}
    assert reasons[f"{ATTENTION}.k_proj"].startswith("relative error 0.04")
    assert reasons[f"{ATTENTION}.q_proj"] == f"one matrix with {ATTENTION}.k_proj in the server"
    assert reasons["lm_head"] is None


def test_the_gate_can_be_opened(spiky_pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, model = spiky_pair
    found = requant_int8(model, tmp_path / "out", source=source, recipe=recipe(max_relative_error=0.06))
    assert found["kept"] == []


def test_a_gate_that_nothing_passes_changes_no_shard(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    found = requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(max_relative_error=0.001))
    assert len(found["kept"]) == 8
    before, after = digests(model), digests(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} <= {"config.json", INDEX}


def test_a_second_run_is_up_to_date(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_source: Path
) -> None:
    before = {p.name: p.stat().st_mtime_ns for p in result[0].iterdir()}
    assert requant_int8(model, result[0], source=tiny_source, recipe=recipe()) == result[1]
    assert {p.name: p.stat().st_mtime_ns for p in result[0].iterdir()} == before


def test_dry_run_writes_nothing_and_knows_the_size(
    result: tuple[Path, dict[str, Any]], model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    plan = requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), dry_run=True)
    assert not (tmp_path / "out").exists()
    assert plan["bytes"] == result[1]["bytes"] == Checkpoint.open(result[0]).nbytes
    assert [row["module"] for row in plan["matrices"]] == [row["module"] for row in result[1]["matrices"]]


def test_another_source_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_source, tmp_path / "other")
    rewrite(tmp_path / "other", "lm_head.weight", lambda w: w + 1)
    with pytest.raises(InputError, match=r"lm_head\.weight differs between the model and the source"):
        requant_int8(model, tmp_path / "out", source=tmp_path / "other", recipe=recipe())
    assert not (tmp_path / "out").exists()


def test_another_recipe_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    other = parse_recipe({**BASE, "quantize": {"bits": {"experts": 2, "gdn_in": 4}}})
    with pytest.raises(InputError, match="is stored at 8 bits, the recipe says 4"):
        requant_int8(model, tmp_path / "out", source=tiny_source, recipe=other)


def test_a_model_that_was_already_repacked_is_refused(
    result: tuple[Path, dict[str, Any]], tiny_source: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="is stored at 8 bits, the recipe says 16"):
        requant_int8(result[0], tmp_path / "out", source=tiny_source, recipe=recipe())


def test_a_source_offered_as_the_model_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"quantization_config\.quant_method is 'absent', not 'auto-round'"):
        requant_int8(tiny_source, tmp_path / "out", source=tiny_source, recipe=recipe())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 64),
        ("group_size", -1),
        ("group_size", "128"),
        ("sym", False),
        ("sym", 1),
        ("packing_format", "auto_round:auto_awq"),
        ("quant_method", ["auto-round"]),
    ],
)
def test_a_model_packed_in_another_way_is_refused(
    key: str, value: object, model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    root = clone(model, tmp_path / "model")
    edit_json(root / "config.json", lambda c: c["quantization_config"].update({key: value}))
    with pytest.raises(InputError, match=rf"quantization_config\.{key} is .*, not "):
        requant_int8(root, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_quantization_config_mapping_is_refused(
    model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    root = clone(model, tmp_path / "model")
    edit_json(root / "config.json", lambda c: c.update(quantization_config=[1]))
    with pytest.raises(InputError, match="quant_method is 'absent'"):
        requant_int8(root, tmp_path / "out", source=tiny_source, recipe=recipe())


def test_fp8_codes_without_scales_are_no_source(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    source = clone(tiny_source, tmp_path / "source")
    edit_tensor(source, f"{ATTENTION}.k_proj.weight", lambda w: w.to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match=r"k_proj\.weight is fp8 and has no weight_scale_inv"):
        requant_int8(model, tmp_path / "out", source=source, recipe=recipe())


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_packed_matrix_whose_parts_do_not_fit_is_refused(
    part: str, model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    root = clone(model, tmp_path / "model")
    edit_tensor(root, f"model.language_model.layers.0.mlp.experts.3.up_proj.{part}", torch.Tensor.flatten)
    with pytest.raises(InputError, match="is stored at 0 bits, the recipe says 2"):
        requant_int8(root, tmp_path / "out", source=tiny_source, recipe=recipe())


def test_a_source_without_rows_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    source = clone(tiny_source, tmp_path / "source")
    edit_tensor(source, f"{ATTENTION}.k_proj.weight", lambda w: w.new_empty(0, w.shape[1]))
    with pytest.raises(InputError, match=r"k_proj\.weight differs between the model and the source"):
        requant_int8(model, tmp_path / "out", source=source, recipe=recipe())


def test_a_read_only_target_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", read_only=True) as disk,
        pytest.raises(InputError, match="Read-only"),
    ):
        requant_int8(model, disk / "out", source=tiny_source, recipe=recipe())


def test_the_models_own_directory_is_refused_as_output(model: Path, tiny_source: Path) -> None:
    before = digests(model)
    with pytest.raises(InputError, match="was written by q38 quantize"):
        requant_int8(model, model, source=tiny_source, recipe=recipe())
    assert digests(model) == before


def test_a_weight_that_is_not_a_number_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    def poisoned(weight: torch.Tensor) -> torch.Tensor:
        weight[-1, -1] = float("nan")
        return weight

    for name, origin in (("source", tiny_source), ("model", model)):
        shutil.copytree(origin, tmp_path / name)
        (tmp_path / name / MANIFEST).unlink()
        rewrite(tmp_path / name, "lm_head.weight", poisoned)
    with pytest.raises(InputError, match=r"lm_head\.weight holds a value that is infinite, not a number"):
        requant_int8(tmp_path / "model", tmp_path / "out", source=tmp_path / "source", recipe=recipe())


def test_too_little_space_is_refused_before_the_first_byte(
    model: Path, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 2**20})
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(ResourceError, match="short"):
        requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert not (tmp_path / "out" / ".q38" / "int8").exists()


def test_a_full_disk_is_one_line_and_the_same_call_goes_on(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = os.pwrite, iter(range(10**9))

    def full(fd: int, data: Any, position: int) -> int:
        if next(calls) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, position)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(ResourceError, match="the disk is full"):
            requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), threads=1)
    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(), threads=1)
    assert digests(tmp_path / "out") == digests(result[0])


def test_a_source_changed_between_two_runs_is_refused(
    model: Path, tiny_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(tiny_source, tmp_path / "source")
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            requant_int8(model, tmp_path / "out", source=tmp_path / "source", recipe=recipe())
    rewrite(tmp_path / "source", f"{ATTENTION}.q_norm.weight", lambda w: w + 1)
    with pytest.raises(InputError, match="was begun with another source"):
        requant_int8(model, tmp_path / "out", source=tmp_path / "source", recipe=recipe())


def test_a_resumed_run_rounds_no_matrix_twice(
    result: tuple[Path, dict[str, Any]],
    model: Path,
    tiny_source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "_write_shards", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    monkeypatch.setattr(module, "_round_matrix", lambda *_, **__: pytest.fail("rounded a second time"))
    requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert digests(tmp_path / "out") == digests(result[0])


@pytest.fixture
def command(model: Path, tiny_source: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "recipe.yaml").write_text(json.dumps(BASE))
    options = [
        "-o",
        str(tmp_path / "out"),
        "--source",
        str(tiny_source),
        "--recipe",
        str(tmp_path / "recipe.yaml"),
    ]
    return [sys.executable, "-m", "q38", "requant-int8", str(model), *options, "--json"]


def test_kill_at_any_point_and_the_same_command_ends_with_the_same_bytes(
    result: tuple[Path, dict[str, Any]], command: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    points, killed = random.Random(0), 0
    for lines in (0, 3, 7, 9, 12):  # of the journal: 8 matrices, 5 shards, metadata
        process = subprocess.Popen(
            [*command, "--threads", "1"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        _wait_for_journal(out, lines, process)
        time.sleep(points.uniform(0, 0.01))
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 3
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["matrices"] == result[1]["matrices"]
    assert digests(out) == digests(result[0])


def _journal(out: Path) -> int:
    journal = out / ".q38" / "journal.jsonl"
    if (out / MANIFEST).exists():
        return 10**9
    try:
        return journal.read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0 if (out / ".q38" / "job.json").exists() else -1


def _wait_for_journal(out: Path, lines: int, process: subprocess.Popen[bytes]) -> None:
    while _journal(out) < lines and process.poll() is None:
        time.sleep(0.001)


def test_the_command_refuses_in_one_line_with_exit_code_2(command: list[str], tmp_path: Path) -> None:
    command[command.index("--source") + 1] = str(tmp_path / "absent")
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert json.loads(done.stdout)["error"]["where"] == str(tmp_path / "absent")
    assert done.stderr.count("\n") == 1
