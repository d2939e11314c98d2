from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.packing import symmetric_zeros
from q38.measure.checks import Check, Fault
from q38.measure.stored import Stored
from q38.measure.structure import check_structure
from tests.measure.packed import edit_json, edit_tensor

LAYER = "model.language_model.layers.0"
EXPERT = f"{LAYER}.mlp.experts.3.up_proj"
DENSE = f"{LAYER}.linear_attn.in_proj_qkv"
Broken = Callable[..., Path]


def checks(model: Path, ple: Path | None = None, source: Path | None = None) -> dict[str, Check]:
    return {c.name: c for c in check_structure(Stored.open(model), source=source, ple=ple).checks}


def failures(model: Path, ple: Path | None = None, source: Path | None = None) -> dict[str, list[Fault]]:
    return {name: c.faults for name, c in checks(model, ple, source).items() if c.passed is False}


def test_a_packed_model_passes(packed: Path, tiny_ple: Path, tiny_source: Path) -> None:
    found = checks(packed, tiny_ple, tiny_source)
    assert {name: c.passed for name, c in found.items() if c.passed is not True} == {}
    assert found["zero-point words"].checked > 200
    assert found["manifest"].checked > 5


def test_the_autoround_model_passes(tiny_quantized: Path, tiny_ple: Path, tiny_source: Path) -> None:
    assert failures(tiny_quantized, tiny_ple, tiny_source) == {}


def test_the_bf16_release_passes(tiny_source: Path) -> None:
    assert failures(tiny_source) == {}


def test_the_fp8_release_passes(tiny_source_fp8: Path) -> None:
    assert failures(tiny_source_fp8) == {}


def test_parts_left_out_as_a_whole_are_named(packed: Path, tiny_ple: Path) -> None:
    assert check_structure(Stored.open(packed), ple=tiny_ple).data["dropped"] == [
        "vision",
        "mtp",
        "n-gram table",
    ]


def test_a_dropped_vision_tower_that_the_config_still_promises_is_missed(
    broken: Broken, tiny_ple: Path
) -> None:
    model = broken()
    edit_json(model / "config.json", lambda c: c.pop("language_model_only"))
    faults = failures(model, tiny_ple)["tensors present"]
    assert faults and all(str(f.tensor).startswith("model.visual.") for f in faults)


@pytest.mark.parametrize(
    "name", [f"{EXPERT}.qweight", f"{EXPERT}.scales", f"{LAYER}.mlp.gate.weight", "lm_head.qzeros"]
)
def test_a_missing_tensor_is_named(broken: Broken, tiny_ple: Path, name: str) -> None:
    model = broken()
    edit_tensor(model, name, lambda _: None)
    assert [f.tensor for f in failures(model, tiny_ple)["tensors present"]] == [name]


def test_a_missing_expert_is_missed_by_all_its_tensors(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    for part in ("qweight", "qzeros", "scales"):
        edit_tensor(model, f"{EXPERT}.{part}", lambda _: None)
    names = {f.tensor for f in failures(model, tiny_ple)["tensors present"]}
    assert names == {f"{EXPERT}.{part}" for part in ("qweight", "qzeros", "scales")}


def test_a_tensor_without_a_place_is_named_with_its_file(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    name = f"{LAYER}.mlp.gate.weight"
    shard = edit_tensor(model, name, lambda t: t)
    checkpoint = Checkpoint.open(model)
    from q38.checkpoint.writer import write_safetensors

    tensors = {n: checkpoint.read(n) for n in checkpoint.headers[shard].tensors} | {
        "model.stray": torch.zeros(2)
    }
    write_safetensors(model / shard, tensors)
    edit_json(model / INDEX, lambda index: index["weight_map"].update({"model.stray": shard}))
    assert failures(model, tiny_ple)["no other tensors"] == [
        Fault(shard, "model.stray", "has no place in this model")
    ]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        (f"{EXPERT}.scales", lambda t: t[:, :-1].contiguous()),
        (f"{EXPERT}.scales", lambda t: t.float()),
        (f"{DENSE}.qweight", lambda t: t[:-1].contiguous()),
        (f"{LAYER}.mlp.gate.weight", lambda t: t.t().contiguous()),
        (f"{LAYER}.mlp.gate.weight", lambda t: t.half()),
    ],
)
def test_a_wrong_shape_or_dtype_is_named(broken: Broken, tiny_ple: Path, name: str, change: Any) -> None:
    model = broken()
    edit_tensor(model, name, change)
    assert name in {f.tensor for f in failures(model, tiny_ple)["shapes and dtypes"]}


@pytest.mark.parametrize("module", [EXPERT, DENSE, "lm_head"])
def test_one_wrong_zero_point_is_found(broken: Broken, tiny_ple: Path, module: str) -> None:
    def flip(words: torch.Tensor) -> torch.Tensor:
        words[-1, -1] ^= 1 << 9
        return words

    model = broken()
    shard = edit_tensor(model, f"{module}.qzeros", flip)
    found = failures(model, tiny_ple)
    assert list(found) == ["zero-point words"]
    (fault,) = found["zero-point words"]
    assert (fault.file, fault.tensor) == (shard, f"{module}.qzeros")
    assert fault.what.startswith("1 of ")


def test_zeros_stored_without_the_minus_one_are_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    # 0xAAAAAAAA: the field holds the zero point 2 itself, as the newer format of GPTQ does.
    edit_tensor(model, f"{EXPERT}.qzeros", lambda t: torch.full_like(t, -1431655766))
    assert (
        "0xAAAAAAAA, a symmetric tensor has 0x55555555"
        in failures(model, tiny_ple)["zero-point words"][0].what
    )


def test_wrong_base_bits_are_found_for_every_expert(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    edit_json(model / "config.json", lambda c: c["quantization_config"].update(bits=4))
    faults = failures(model, tiny_ple)["bits by both engines' rules"]
    assert EXPERT in {f.tensor for f in faults}
    assert "4 bit" in faults[0].what and "2 bit" in faults[0].what


def test_a_wrong_entry_is_found_for_its_module_only(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    edit_json(model / "config.json", lambda c: c["quantization_config"]["extra_config"][DENSE].update(bits=2))
    faults = failures(model, tiny_ple)["bits by both engines' rules"]
    assert [f.tensor for f in faults] == [DENSE]
    assert faults[0].file.endswith(".safetensors")


def test_a_lost_entry_of_a_fused_name_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    edit_json(
        model / "config.json",
        lambda c: c["quantization_config"]["extra_config"].pop(f"{LAYER}.linear_attn.in_proj_qkvz"),
    )
    faults = failures(model, tiny_ple)["bits by both engines' rules"]
    assert any("SGLang" in f.what or f"{LAYER}.linear_attn" in str(f.tensor) for f in faults)


def test_members_of_a_fused_matrix_with_two_widths_are_found(
    broken: Broken, tiny_ple: Path, tiny_source: Path
) -> None:
    model = broken()
    module = f"{LAYER}.linear_attn.in_proj_z"
    weight = Checkpoint.open(tiny_source).read(f"{module}.weight").float()
    repack(model, module, weight, bits=4)
    fault = failures(model, tiny_ple)["fused groups"][0]
    assert fault.tensor == f"{LAYER}.linear_attn.in_proj_qkvz"
    assert "in_proj_z" in fault.what or "in_proj_qkv" in fault.what


def test_an_expert_of_another_width_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    repack(model, EXPERT, torch.randn(128, 256), bits=4)
    fault = failures(model, tiny_ple)["fused groups"][0]
    assert fault.tensor == f"{LAYER}.mlp.experts"
    assert EXPERT in fault.what


def repack(model: Path, module: str, weight: torch.Tensor, bits: int) -> None:
    from q38.quantize.rtn import round_to_nearest

    for part, value in round_to_nearest(weight, bits, 128)._asdict().items():
        edit_tensor(model, f"{module}.{part}", lambda _, value=value: value)


@pytest.mark.parametrize(
    ("key", "value"), [("sym", False), ("packing_format", "auto_round:auto_awq"), ("data_type", "fp")]
)
def test_a_field_that_no_shape_confirms_is_checked(
    broken: Broken, tiny_ple: Path, key: str, value: object
) -> None:
    model = broken()
    edit_json(model / "config.json", lambda c: c["quantization_config"].update({key: value}))
    assert key in failures(model, tiny_ple)["quantization_config"][0].what


def test_a_stale_second_config_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    config = json.loads((model / "config.json").read_text())["quantization_config"]
    (model / "quantization_config.json").write_text(json.dumps({**config, "bits": 4}))
    assert failures(model, tiny_ple)["quantization_config"][0].file == "quantization_config.json"


def test_a_truncated_shard_is_a_row_and_its_tensors_are_missing(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    shard = model / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    found = failures(model, tiny_ple)
    assert found["index and shards"][0].file == shard.name
    assert "truncated" in found["index and shards"][0].what
    assert len(found["tensors present"]) > 100


@pytest.mark.parametrize("content", [b"", b"\x00" * 7, b"not a safetensors file at all"])
def test_an_empty_or_foreign_shard_is_a_row(broken: Broken, tiny_ple: Path, content: bytes) -> None:
    model = broken()
    (model / "model-00001-of-00003.safetensors").write_bytes(content)
    assert failures(model, tiny_ple)["index and shards"][0].file == "model-00001-of-00003.safetensors"


def test_an_absent_shard_is_a_row(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    (model / "model-00003-of-00003.safetensors").unlink()
    assert failures(model, tiny_ple)["index and shards"][0].what == "no such file"


def test_an_index_that_places_a_tensor_wrongly_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    name = f"{EXPERT}.qweight"
    right = Checkpoint.open(model).info(name).file.name
    wrong = next(
        s for s in ("model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors") if s != right
    )
    edit_json(model / INDEX, lambda index: index["weight_map"].update({name: wrong}))
    assert failures(model, tiny_ple)["index and shards"] == [
        Fault(INDEX, name, f"is placed in {wrong}, which does not hold it")
    ]


def test_an_index_that_forgets_a_tensor_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    edit_json(model / INDEX, lambda index: index["weight_map"].pop(f"{EXPERT}.qweight"))
    assert failures(model, tiny_ple)["index and shards"][0].tensor == f"{EXPERT}.qweight"


def test_a_broken_index_is_a_row(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    (model / INDEX).write_text("{")
    assert failures(model, tiny_ple)["index and shards"][0].file == INDEX


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        Stored.open(tmp_path / "none")


def test_an_unknown_quantization_method_is_refused(broken: Broken) -> None:
    model = broken()
    edit_json(model / "config.json", lambda c: c["quantization_config"].update(quant_method="awq"))
    with pytest.raises(InputError, match="quant_method is 'awq'"):
        check_structure(Stored.open(model))


def swap_two_tokens(tokenizer: dict[str, Any]) -> None:
    vocab = tokenizer["model"]["vocab"]
    a, b = list(vocab)[300:302]
    vocab[a], vocab[b] = vocab[b], vocab[a]


def test_a_swapped_tokenizer_is_found_against_the_source(
    broken: Broken, tiny_ple: Path, tiny_source: Path
) -> None:
    model = broken()
    edit_json(model / "tokenizer.json", swap_two_tokens)
    found = failures(model, tiny_ple, tiny_source)
    assert found == {"tokenizer": [Fault("tokenizer.json", None, "vocabulary differs from the source's")]}


def test_a_swapped_tokenizer_is_found_by_the_manifest_alone(broken: Broken, tiny_ple: Path) -> None:
    model = broken(manifest=True)
    file = model / "tokenizer.json"
    text = file.read_text(encoding="utf-8")
    at = text.index('"vocab"') + 200
    file.write_text(text[:at] + ("x" if text[at] != "x" else "y") + text[at + 1 :], encoding="utf-8")
    assert failures(model, tiny_ple)["manifest"][0].file == "tokenizer.json"


def test_a_tokenizer_written_in_another_style_is_the_same(
    broken: Broken, tiny_ple: Path, tiny_source: Path
) -> None:
    def pairs(tokenizer: dict[str, Any]) -> None:
        merges = tokenizer["model"]["merges"]
        tokenizer["model"]["merges"] = [m.split(" ") if isinstance(m, str) else " ".join(m) for m in merges]

    model = broken()
    edit_json(model / "tokenizer.json", pairs)
    template = (model / "chat_template.jinja").read_text(encoding="utf-8")
    (model / "chat_template.jinja").unlink()
    edit_json(model / "tokenizer_config.json", lambda c: c.update(chat_template=template))
    assert failures(model, tiny_ple, tiny_source) == {}


def test_a_changed_chat_template_is_found(broken: Broken, tiny_ple: Path, tiny_source: Path) -> None:
    model = broken()
    (model / "chat_template.jinja").write_text("{{ messages }}")
    assert (
        failures(model, tiny_ple, tiny_source)["tokenizer"][0].what
        == "chat_template differs from the source's"
    )


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_a_missing_tokenizer_file_is_named(broken: Broken, tiny_ple: Path, name: str) -> None:
    model = broken()
    (model / name).unlink()
    assert failures(model, tiny_ple)["tokenizer"][0].file == name


def test_a_token_outside_the_embedding_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken()
    edit_json(model / "tokenizer.json", lambda t: t["model"]["vocab"].update({"zzzz": 99_999}))
    assert "99999" in failures(model, tiny_ple)["tokenizer"][0].what


def test_an_absent_ngram_table_is_found(broken: Broken) -> None:
    assert "name it with --ple" in failures(broken())["n-gram table"][0].what


def test_the_table_of_another_model_is_found(broken: Broken, tiny_ple: Path, tmp_path: Path) -> None:
    ple = tmp_path / "other"
    shutil.copytree(tiny_ple, ple)
    info = json.loads((ple / "ple.json").read_text())
    half = info["rows"] // 2
    table = ple / info["file"]
    table.write_bytes(table.read_bytes()[: info["bytes"] // 2])
    edit_json(ple / "ple.json", lambda p: p.update(rows=half, bytes=info["bytes"] // 2))
    assert f"{half} rows" in failures(broken(), ple)["n-gram table"][0].what


def test_a_wrong_constant_of_the_ngram_hash_is_found(broken: Broken, tiny_ple: Path) -> None:
    model, name = broken(), "model.language_model.layers.1.ple.ple_embedding.layer_multipliers"
    edit_tensor(model, name, lambda t: t + 2)
    assert [f.tensor for f in failures(model, tiny_ple)["n-gram constants"]] == [name]


def test_a_file_of_another_size_than_the_manifest_says_is_found(broken: Broken, tiny_ple: Path) -> None:
    model = broken(manifest=True)
    with (model / "generation_config.json").open("a") as f:
        f.write(" ")
    assert failures(model, tiny_ple)["manifest"][0].file == "generation_config.json"


def test_symmetric_zeros_are_the_words_the_layout_documents() -> None:
    assert set(symmetric_zeros(2, 64, 2).flatten().tolist()) == {0x55555555}
    assert set(symmetric_zeros(2, 64, 8).flatten().tolist()) == {0x7F7F7F7F}
