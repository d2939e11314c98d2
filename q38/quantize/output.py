"""config.json, index and copied files of a quantized checkpoint, and the check of what was written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q38.base.errors import CheckFailed
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.writer import FileRecord, copy_file, write_json
from q38.model.shape import ModelShape
from q38.quantize.plan import Plan
from q38.quantize.requant_plan import stored_bits
from q38.recipe.bits import check_resolution, quantization_config
from q38.recipe.schema import Recipe

CONFIG = "config.json"
COPIED = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation and processor configs
# A second quantization config goes stale when a later step edits the first.
NOT_COPIED = (CONFIG, INDEX, MANIFEST, "quantization_config.json", "quantize_config.json")


def write_metadata(
    out: Path, source: Checkpoint, plan: Plan, recipe: Recipe, facts: Mapping[str, Any]
) -> dict[str, FileRecord]:
    """Write everything that is not a shard.

    Args:
        facts: of the run, added to the quantization_config.

    Returns:
        File name -> record.
    """
    places = {part.name: shard.file for shard in plan.shards for part in shard.parts}
    index = {"metadata": {"total_size": plan.nbytes}, "weight_map": places}
    files = {
        INDEX: write_json(out / INDEX, index),
        CONFIG: write_json(out / CONFIG, output_config(source.config, plan, recipe, facts)),
    }
    for path in copied_files(source):
        files[path.name] = copy_file(path, out / path.name)
    return files


def copied_files(source: Checkpoint) -> list[Path]:
    """The source's files that the output has as they are."""
    return [
        path
        for path in sorted(source.path.iterdir())
        if path.is_file() and path.suffix in COPIED and path.name not in NOT_COPIED
    ]


def output_config(
    source: Mapping[str, Any], plan: Plan, recipe: Recipe, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json of the output: the source's, with what was done to the model.

    Every field of the source is kept (AutoRound's own export loses partial_rotary_factor), the layer
    types in the release's spelling.
    """
    config = {key: value for key, value in source.items() if key != "quantization_config"}
    text = {**source["text_config"]} if "text_config" in source else config
    text["layer_types"] = list(ModelShape.from_config(source).layer_types)
    if recipe.quantize.mtp == "drop" and text.get("mtp_num_hidden_layers"):
        text["mtp_num_hidden_layers"] = 0
    if "text_config" in source:
        config["text_config"] = text
    if recipe.quantize.vision == "drop" and "vision_config" in source:
        config["language_model_only"] = True
    config["quantization_config"] = {**quantization_config(plan.bits, recipe), **facts}
    return config


def check_written(out: Checkpoint, plan: Plan) -> None:
    """Compare the written files with the plan, tensor by tensor, and read their config back by both engines' rules.

    Raises:
        CheckFailed: a tensor is missing, unexpected, or of another dtype or shape than planned; a packed
            matrix also lies there unpacked; or an engine would read a module at another width.
    """
    planned = {part.name: part for shard in plan.shards for part in shard.parts}
    for name, part in planned.items():
        info = out.tensors.get(name)
        if info is None:
            raise _failed(name, "was planned and is not in the output")
        if (info.dtype, info.shape) != (part.dtype, part.shape):
            raise _failed(
                name, f"is {info.dtype} {list(info.shape)}, planned was {part.dtype} {list(part.shape)}"
            )
    extra = next((name for name in out.tensors if name not in planned), None)
    if extra is not None:
        raise _failed(extra, "is in the output and was not planned")
    found = {module: stored_bits(out, module) for module in plan.bits}
    for module, width in plan.bits.items():
        if found[module] != width:
            raise _failed(module, f"is stored at {found[module]} bits, the recipe says {width}")
    check_resolution(out.config["quantization_config"], found)


def _failed(where: str, what: str) -> CheckFailed:
    return CheckFailed(what, where=where, remedy="run again with --fresh, and report it if it comes back")
