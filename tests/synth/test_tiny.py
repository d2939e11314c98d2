"""`q38 synth tiny`: the release's layout, the same bytes twice, and a source transformers can load."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.data import data_path
from q38.model.expected import source_tensors
from q38.model.names import NGRAM_SHARD, Group, classify
from q38.model.ngram import head_offsets, head_sizes, multipliers
from q38.model.shape import ModelShape
from q38.recipe.bits import plan_bits
from q38.recipe.schema import parse_recipe
from q38.synth.config import tiny_config
from q38.synth.tiny import plan_tiny, synth_tiny

REAL = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())


def digests(directory: Path) -> dict[str, str]:
    """File name -> sha256; the manifest, which holds a date, left out."""
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(directory.iterdir())
        if p.is_file() and p.name != MANIFEST
    }


def command(out: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "q38", "synth", "tiny", str(out), "--json", *options],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


@pytest.mark.parametrize("fp8", [False, True])
def test_the_tensors_are_those_the_config_asks_for(
    tiny_source: Path, tiny_source_fp8: Path, fp8: bool
) -> None:
    checkpoint = Checkpoint.open(tiny_source_fp8 if fp8 else tiny_source)
    expected = {t.name: t for t in source_tensors(checkpoint.config, "fp8" if fp8 else "bf16")}
    assert checkpoint.tensors.keys() == expected.keys()
    for name, info in checkpoint.tensors.items():
        assert (info.dtype, info.shape) == (expected[name].dtypes[0], expected[name].shape), name


def test_the_config_has_every_field_of_the_release_and_nothing_else() -> None:
    def keys(value: Any) -> Any:
        return {k: keys(v) for k, v in value.items()} if isinstance(value, dict) else None

    tiny = tiny_config()
    for section in ("text_config", "vision_config"):
        assert REAL[section].keys() <= tiny[section].keys()
    assert tiny["text_config"].keys() - REAL["text_config"].keys() <= {
        "output_router_logits", "pad_token_id", "partial_rotary_factor", "router_aux_loss_coef",
    }  # fmt: skip
    assert keys(REAL).keys() <= tiny.keys()


def test_the_config_keeps_the_constraints_of_the_real_model() -> None:
    config = tiny_config()
    shape, real = ModelShape.from_config(config), ModelShape.from_config(REAL)
    assert shape.layer_types == real.layer_types[:4]
    for field in ("head_dim", "linear_key_head_dim", "linear_value_head_dim", "indexer_head_dim", "hc_count"):
        assert getattr(shape, field) == getattr(real, field)
    assert shape.indexer_budget // shape.indexer_compress_ratio in (512, 2048)  # SGLang's top-k kernel
    assert shape.ngram is not None
    assert real.ngram is not None
    assert shape.ngram.layer_ids == real.ngram.layer_ids
    assert shape.ngram.heads == real.ngram.heads
    assert shape.linear_num_value_heads > shape.linear_num_key_heads
    assert shape.num_attention_heads > shape.num_key_value_heads


def test_every_group_of_the_published_policy_can_be_packed_in_groups_of_128() -> None:
    bits = {"experts": 2, "gdn_in": 8, "shared_expert": 8}
    groups = ["gdn_out", "attention", "lm_head", "indexer"]
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "t",
            "quantize": {"bits": bits, "allow_low": ["indexer"]},
            "requant_int8": {"groups": groups},
        }
    )
    plan = plan_bits(tiny_config(), recipe)
    assert {classify(m) for m, width in plan.items() if width < 16} == {Group(g) for g in (*bits, *groups)}


def test_the_shards_of_the_table_sort_rightly_only_as_numbers(tiny_source: Path) -> None:
    checkpoint = Checkpoint.open(tiny_source)
    numbers = [int(m["n"]) for name in sorted(checkpoint.tensors) if (m := NGRAM_SHARD.match(name))]
    assert len(numbers) >= 12
    assert numbers != sorted(numbers)
    assert sorted(numbers) == list(range(len(numbers)))


def test_the_ngram_constants_are_those_of_the_seed(tiny_source: Path) -> None:
    checkpoint = Checkpoint.open(tiny_source)
    shape = ModelShape.from_config(checkpoint.config)
    assert shape.ngram is not None
    prefix = "model.language_model.layers.1.ple.ple_embedding"
    for name, values in (
        ("layer_multipliers", multipliers(shape)),
        ("ngram_heads_vocab_sizes", head_sizes(shape.ngram)),
        ("ngram_heads_offsets", head_offsets(shape.ngram)),
    ):
        assert checkpoint.read(f"{prefix}.{name}").tolist() == list(values)


def test_no_tensor_is_constant(tiny_source: Path) -> None:
    checkpoint = Checkpoint.open(tiny_source)
    for name in checkpoint.tensors:
        values = checkpoint.read(name).double()
        assert torch.isfinite(values).all()
        assert values.std() > 0, name


def test_the_index_and_the_manifest_agree_with_the_files(tiny_source: Path) -> None:
    manifest = json.loads((tiny_source / MANIFEST).read_text())
    assert {n: r["sha256"] for n, r in manifest["files"].items()} == digests(tiny_source)
    index = json.loads((tiny_source / INDEX).read_text())
    checkpoint = Checkpoint.open(tiny_source)
    assert index["metadata"]["total_size"] == checkpoint.nbytes == manifest["result"]["tensor_bytes"]
    assert len(set(index["weight_map"].values())) > 3


@pytest.mark.parametrize("fp8", [False, True])
def test_the_plan_knows_the_size(tiny_source: Path, tiny_source_fp8: Path, fp8: bool) -> None:
    checkpoint = Checkpoint.open(tiny_source_fp8 if fp8 else tiny_source)
    plan = plan_tiny(fp8=fp8)
    assert (plan["tensors"], plan["tensor_bytes"]) == (len(checkpoint.tensors), checkpoint.nbytes)


def test_transformers_loads_the_bf16_layout_whole(tiny_source: Path) -> None:
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.from_pretrained(tiny_source, local_files_only=True)
    assert config.text_config.layer_types == ["linear_attention"] * 3 + ["indexed_attention"]
    model, report = AutoModelForImageTextToText.from_pretrained(
        tiny_source, dtype=torch.bfloat16, output_loading_info=True, local_files_only=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert all(name.startswith("mtp.") for name in report["unexpected_keys"])
    assert model.generation_config.eos_token_id == [2002, 2000]
    checkpoint = Checkpoint.open(tiny_source)
    shards = sorted((int(m["n"]), n) for n in checkpoint.tensors if (m := NGRAM_SHARD.match(n)))
    table = model.model.language_model.layers[1].ple.ple_embedding.ngram_embedding.weight
    assert torch.equal(table, torch.cat([checkpoint.read(name) for _, name in shards]))
    answer = model.generate(torch.tensor([[2001, 300, 301]]), max_new_tokens=3, do_sample=False)
    assert answer.shape == (1, 6)


def test_the_fp8_layout_holds_the_weights_of_the_bf16_layout(
    tiny_source: Path, tiny_source_fp8: Path
) -> None:
    source, fp8 = Checkpoint.open(tiny_source), Checkpoint.open(tiny_source_fp8)
    prefix = "model.language_model.layers.2.mlp.experts"
    up = source.read(f"{prefix}.gate_up_proj")[5, 128:].float()
    codes, scales = (fp8.read(f"{prefix}.5.up_proj.weight{s}") for s in ("", "_scale_inv"))
    assert (dequantize_blocks(codes, scales).float() - up).norm() < 0.04 * up.norm()
    name = "model.language_model.layers.1.linear_attn.out_proj.weight"
    assert source.read_bytes(name) == fp8.read_bytes(name)
    assert fp8.config["quantization_config"]["weight_block_size"] == [128, 128]


def test_the_same_options_give_the_same_bytes_in_another_process(tiny_source: Path, tmp_path: Path) -> None:
    process = command(tmp_path / "again", OMP_NUM_THREADS="1", PYTHONHASHSEED="7")
    assert json.loads(process.communicate()[0])["tensors"] == 178
    assert digests(tmp_path / "again") == digests(tiny_source)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(tiny_source: Path, tmp_path: Path) -> None:
    synth_tiny(tmp_path / "other", seed=1)
    before, after = digests(tiny_source), digests(tmp_path / "other")
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {name for name in before if name.endswith(".safetensors")}


def test_eight_layers_have_two_of_attention(tmp_path: Path) -> None:
    synth_tiny(tmp_path / "eight", layers=8)
    checkpoint = Checkpoint.open(tmp_path / "eight")
    assert ModelShape.from_config(checkpoint.config).attention_layers == (3, 7)
    assert checkpoint.tensors.keys() == {t.name for t in source_tensors(checkpoint.config)}


@pytest.mark.parametrize("layers", [0, 2, 6, -4])
def test_a_number_of_layers_without_both_kinds_is_refused(tmp_path: Path, layers: int) -> None:
    with pytest.raises(InputError, match="multiple of 4"):
        synth_tiny(tmp_path / "out", layers=layers)
    assert not (tmp_path / "out").exists()


def test_a_negative_seed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="negative"):
        synth_tiny(tmp_path / "out", seed=-1)


def test_a_directory_with_other_files_is_refused_and_kept(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep me")
    with pytest.raises(InputError, match="files that q38 did not write"):
        synth_tiny(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]


def test_other_options_are_refused_and_named(tiny_source: Path) -> None:
    with pytest.raises(InputError, match=re.escape("another seed (0, now 5)")):
        synth_tiny(tiny_source, seed=5)


def test_fresh_replaces_an_earlier_run(tiny_source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    synth_tiny(out, seed=5)
    synth_tiny(out, fresh=True)
    assert digests(out) == digests(tiny_source)


def test_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 2**20}))
    with pytest.raises(ResourceError, match="short"):
        synth_tiny(tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_kill_at_any_point_and_the_same_command_ends_with_the_same_bytes(
    tiny_source: Path, tmp_path: Path
) -> None:
    out, killed = tmp_path / "out", 0
    for lines in (0, 2, 8):  # of the journal: small files, 10 shards, index
        process = command(out)
        while _journal(out) < lines and process.poll() is None:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        killed += process.wait() == -signal.SIGKILL
    assert killed >= 2
    synth_tiny(out)
    assert digests(out) == digests(tiny_source)
    assert not (out / ".q38").exists()


def _journal(out: Path) -> int:
    if (out / MANIFEST).exists():
        return 10**9
    try:
        return (out / ".q38" / "journal.jsonl").read_bytes().count(b"\n")
    except FileNotFoundError:
        return 0 if (out / ".q38" / "job.json").exists() else -1


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    process = command(tmp_path / "out", "--dry-run")
    document = json.loads(process.communicate()[0])
    assert process.returncode == 0
    assert document == {"out": str(tmp_path / "out"), "dry_run": True, **plan_tiny()}
    assert not (tmp_path / "out").exists()
