"""A packed checkpoint by plain rounding: made in a second, for tests that break it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.job import Job
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import copy_file, write_json, write_safetensors
from q38.model.names import Group, classify
from q38.quantize.rtn import round_to_nearest
from q38.recipe.bits import plan_bits, quantization_config
from q38.recipe.schema import Recipe

SHARDS = 3


def pack_model(source: Path, out: Path, recipe: Recipe) -> None:
    """Write the packed checkpoint that `recipe` describes, text model only, with a manifest."""
    checkpoint = Checkpoint.open(source)
    weights = SourceWeights(checkpoint)
    bits = plan_bits(checkpoint.config, recipe)
    tensors: dict[str, torch.Tensor] = {}
    for module, width in bits.items():
        n = (weights.shape(module) or (0, 0))[0]
        if width < 16:
            packed = round_to_nearest(weights.rows(module, 0, n), width, recipe.quantize.group_size)
            tensors |= {f"{module}.{part}": value for part, value in packed._asdict().items()}
        else:
            tensors[f"{module}.weight"] = weights.rows(module, 0, n).bfloat16()
    for name in checkpoint.tensors:
        group = classify(name)
        if name.startswith(("mtp.", "model.visual.")) or group in (Group.EXPERTS, Group.NGRAM):
            continue
        if name.removesuffix(".weight") not in bits:
            tensors[name] = checkpoint.read(name)
    names = sorted(tensors)
    with Job(out, "quantize", {"source": checkpoint.fingerprint}) as job:
        weight_map = {}
        for i in range(SHARDS):
            shard = f"model-{i + 1:05d}-of-{SHARDS:05d}.safetensors"
            part = {name: tensors[name] for name in names[i::SHARDS]}
            weight_map |= dict.fromkeys(part, shard)
            job.commit(shard, files={shard: write_safetensors(out / shard, part)})
        config = {k: v for k, v in checkpoint.config.items() if k != "quantization_config"}
        config |= {"quantization_config": quantization_config(bits, recipe), "language_model_only": True}
        files = {
            INDEX: write_json(out / INDEX, {"metadata": {}, "weight_map": weight_map}),
            "config.json": write_json(out / "config.json", config),
        }
        for name in (
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
            "generation_config.json",
        ):
            files[name] = copy_file(source / name, out / name)
        job.commit("files", files=files)
        job.finish()


def copy_model(model: Path, out: Path, *, manifest: bool = True) -> Path:
    """A copy to break. Without its manifest, the content checks have to find the damage."""
    shutil.copytree(model, out, ignore=None if manifest else shutil.ignore_patterns("MANIFEST.json"))
    return out


def edit_tensor(model: Path, name: str, change: Any) -> str:
    """Replace one tensor by `change(tensor)`; None removes it. Returns the shard's name."""
    checkpoint = Checkpoint.open(model)
    file = checkpoint.info(name).file
    tensors = {n: checkpoint.read(n) for n in checkpoint.headers[file.name].tensors}
    changed = change(tensors[name])
    if changed is None:
        del tensors[name]
        edit_json(model / INDEX, lambda index: index["weight_map"].pop(name))
    else:
        tensors[name] = changed
    write_safetensors(file, tensors)
    return file.name


def edit_json(file: Path, change: Any) -> None:
    """Apply `change` to the parsed JSON in place."""
    value = json.loads(file.read_text(encoding="utf-8"))
    change(value)
    file.write_text(json.dumps(value), encoding="utf-8")
