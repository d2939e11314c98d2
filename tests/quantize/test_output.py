"""config.json and copied files of the output, and the check that refuses one that is not as planned."""

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
from q38.checkpoint.packing import symmetric_zeros
from q38.checkpoint.writer import write_safetensors
from q38.model.names import LAYERS
from q38.quantize.output import check_written, output_config
from q38.quantize.plan import Part, Plan
from q38.quantize.requant_plan import stored_bits
from q38.quantize.shards import check_matrix
from q38.recipe.schema import Recipe


@pytest.fixture
def config(tiny_source: Path) -> dict[str, Any]:
    return Checkpoint.open(tiny_source).config


@pytest.fixture
def copied(tiny_quantized: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_quantized, tmp_path / "model")
    return tmp_path / "model"


def test_every_field_of_the_source_is_kept(config: dict[str, Any], tiny_quantized: Path) -> None:
    text = json.loads((tiny_quantized / "config.json").read_text())["text_config"]
    changed = {key for key, value in config["text_config"].items() if text.get(key) != value}
    assert changed <= {"mtp_num_hidden_layers"}
    assert text["full_attention_interval"] == 4
    assert text["partial_rotary_factor"] == config["text_config"]["partial_rotary_factor"]


def test_layer_types_are_written_in_the_spelling_of_the_release(
    config: dict[str, Any], plan: Plan, fast: Recipe
) -> None:
    config["text_config"]["layer_types"] = [
        "indexed_attention" if kind == "full_attention" else kind
        for kind in config["text_config"]["layer_types"]
    ]
    assert output_config(config, plan, fast, {})["text_config"]["layer_types"] == list(plan.shape.layer_types)


def test_dropped_parts_are_marked_in_the_config(
    config: dict[str, Any], plan: Plan, vary: Callable[..., Recipe]
) -> None:
    dropped = output_config(config, plan, vary(), {})
    assert dropped["language_model_only"] is True
    assert dropped["text_config"]["mtp_num_hidden_layers"] == 0
    kept = output_config(config, plan, vary(mtp="keep", vision="keep"), {})
    assert "language_model_only" not in kept
    assert kept["text_config"]["mtp_num_hidden_layers"] == 1


def test_the_fp8_config_of_a_source_is_replaced(plan: Plan, fast: Recipe, tiny_source_fp8: Path) -> None:
    source = Checkpoint.open(tiny_source_fp8).config
    assert source["quantization_config"]["quant_method"] == "fp8"
    assert output_config(source, plan, fast, {})["quantization_config"]["quant_method"] == "auto-round"


def test_tokenizer_and_generation_config_are_copied_and_no_second_quantization_config(
    tiny_source: Path, tiny_quantized: Path
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        assert (tiny_quantized / name).read_bytes() == (tiny_source / name).read_bytes()
    assert not list(tiny_quantized.glob("quant*_config.json"))
    assert not [path for path in tiny_quantized.iterdir() if path.is_dir()]


def test_everything_not_packed_is_the_sources_bytes(
    plan: Plan, tiny_source: Path, tiny_quantized: Path
) -> None:
    source, out = Checkpoint.open(tiny_source), Checkpoint.open(tiny_quantized)
    copies = [part.name for shard in plan.shards for part in shard.parts if part.kind == "copy"]
    assert len(copies) > 50
    for name in copies:
        assert out.read_bytes(name) == source.read_bytes(name), name


def test_the_output_passes_its_own_check(plan: Plan, tiny_quantized: Path) -> None:
    out = Checkpoint.open(tiny_quantized)
    check_written(out, plan)
    assert {module: stored_bits(out, module) for module in plan.bits} == plan.bits


def rewrite(root: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Checkpoint:
    """Change the tensors of block 0's shard, and the index with it."""
    file = root / "model-00002-of-00005.safetensors"
    checkpoint = Checkpoint.open(root)
    tensors = {name: checkpoint.read(name) for name, info in checkpoint.tensors.items() if info.file == file}
    before = set(tensors)
    change(tensors)
    write_safetensors(file, tensors)
    index = root / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    for name in before - set(tensors):
        del value["weight_map"][name]
    value["weight_map"].update(dict.fromkeys(tensors, file.name))
    index.write_text(json.dumps(value))
    return Checkpoint.open(root)


UP = f"{LAYERS}.0.mlp.experts.0.up_proj"


def test_a_matrix_at_another_width_is_refused(copied: Path, plan: Plan) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.qweight"] = tensors[f"{UP}.qweight"].repeat(2, 1)
        tensors[f"{UP}.qzeros"] = tensors[f"{UP}.qzeros"].repeat(1, 2)

    with pytest.raises(CheckFailed, match=r"up_proj\.qweight: is I32"):
        check_written(rewrite(copied, widen), plan)


def test_a_missing_tensor_is_refused(copied: Path, plan: Plan) -> None:
    with pytest.raises(CheckFailed, match=r"up_proj\.scales: was planned and is not in the output"):
        check_written(rewrite(copied, lambda tensors: tensors.pop(f"{UP}.scales")), plan)


def test_a_packed_matrix_that_also_lies_there_unpacked_is_refused(copied: Path, plan: Plan) -> None:
    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{UP}.weight"] = torch.zeros(2, 2)

    with pytest.raises(CheckFailed, match=r"up_proj\.weight: is in the output and was not planned"):
        check_written(rewrite(copied, add), plan)


def test_a_config_that_an_engine_reads_otherwise_is_refused(copied: Path, plan: Plan) -> None:
    file = copied / "config.json"
    value = json.loads(file.read_text())
    value["quantization_config"]["extra_config"][f"{LAYERS}.0.linear_attn.in_proj_z"]["bits"] = 2
    file.write_text(json.dumps(value))
    with pytest.raises(InputError, match=r"in_proj_z: AutoRound would read it at 2 bits"):
        check_written(Checkpoint.open(copied), plan)


@pytest.mark.parametrize(
    ("field", "tensor", "message"),
    [
        (
            "qweight",
            torch.zeros(16, 31, dtype=torch.int32),
            r"came out as I32 \[16, 31\], planned is I32 \[16, 32\]",
        ),
        ("qzeros", symmetric_zeros(2, 32, 2) + 1, "zero points other than 2"),
        ("scales", torch.full((2, 32), float("inf"), dtype=torch.float16), "infinite or not a number"),
    ],
)
def test_a_broken_packed_tensor_is_refused(field: str, tensor: torch.Tensor, message: str) -> None:
    shapes = {"qweight": ("I32", (16, 32)), "qzeros": ("I32", (2, 2)), "scales": ("F16", (2, 32))}
    part = Part(f"m.{field}", *shapes[field], "packed", "m")
    with pytest.raises(CheckFailed, match=message):
        check_matrix(part, tensor, bits=2)
