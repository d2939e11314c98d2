"""Full-size checkpoints as sparse files: true headers, holes for data.

For trying inspect, plan and dry runs on the real shape without the weights. What a reader checks by
value is really written: the n-gram constants, zero-point words, and the first bytes of each tensor.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import INDEX, read_json
from q38.checkpoint.job import MANIFEST, Job
from q38.checkpoint.writer import TEMPORARY, FileRecord, fsync_directory, write_json, writing
from q38.data import data_path
from q38.model.expected import Expected, Layout, quantized_tensors, source_tensors
from q38.model.names import Group, classify
from q38.model.ngram import constants
from q38.model.shape import ModelShape
from q38.recipe.bits import plan_bits, quantization_config
from q38.recipe.schema import Recipe, load_recipe

_CONSTANTS = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
_EXPONENTS = {"BF16": 0x3C, "F16": 0x24, "F32": 0x3C}  # top byte of about 0.02
_REAL_BYTES = 4096  # written at the start of each tensor; the rest is a hole


def synth_sparse(
    out: Path,
    config: Path | None = None,
    *,
    layout: Layout,
    recipe: str | None = None,
    shard_bytes: int = 2_750_000_000,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write a checkpoint of a config's shape in the given layout.

    Args:
        config: config.json whose shape to use; the real model's if None.
        recipe: what was quantized to how many bits; for layout "quantized" alone.
        shard_bytes: tensor bytes after which a new shard begins.

    Returns:
        {"tensors", "tensor_bytes", "shards", "disk_bytes"}; disk_bytes is what the holes leave.

    Raises:
        InputError: a bad config or recipe, or a quantized layout without a recipe.
    """
    values, parsed = _inputs(config, layout, recipe)
    resolved = parsed.to_dict() if parsed else None
    identity = {"config": values, "layout": layout, "recipe": resolved, "shard_bytes": shard_bytes}
    with Job(out, "synth sparse", identity, inputs=(config,), fresh=fresh, progress=progress) as job:
        if job.up_to_date:
            return dict(read_json(out / MANIFEST)["result"])
        tensors, final_config = _tensors(values, layout, parsed)
        shards = _split(tensors, shard_bytes)
        shape = ModelShape.from_config(values)
        places: dict[str, str] = {}
        with progress.task("synth sparse", len(shards), "shards") as task:
            for i, shard in enumerate(shards, 1):
                name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
                places |= dict.fromkeys((t.name for t in shard), name)
                if name not in job.done:
                    job.commit(name, files={name: _write_sparse(out / name, shard, shape)})
                task.advance(1)
        total = sum(_bytes(t) for t in tensors)
        index = write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": places})
        job.commit(
            "index", files={INDEX: index, "config.json": write_json(out / "config.json", final_config)}
        )
        disk = sum(file.stat().st_blocks * 512 for file in out.glob("model*"))
        result = {"tensors": len(tensors), "tensor_bytes": total, "shards": len(shards), "disk_bytes": disk}
        job.finish(result)
        return result


def plan_sparse(config: Path | None = None, *, layout: Layout, recipe: str | None = None) -> dict[str, Any]:
    """What `synth_sparse` would write: {"tensors", "tensor_bytes"}."""
    values, parsed = _inputs(config, layout, recipe)
    tensors, _ = _tensors(values, layout, parsed)
    return {"tensors": len(tensors), "tensor_bytes": sum(_bytes(t) for t in tensors)}


def _inputs(config: Path | None, layout: Layout, recipe: str | None) -> tuple[dict[str, Any], Recipe | None]:
    values = read_json(config or data_path("assets", "models", "qwen3.8-flash-next.json"))
    if layout == "quantized" and recipe is None:
        raise InputError("the quantized layout needs a recipe", remedy="add --recipe quality-24gb")
    return values, load_recipe(recipe) if layout == "quantized" and recipe else None


def _tensors(
    config: Mapping[str, Any], layout: Layout, recipe: Recipe | None
) -> tuple[list[Expected], dict[str, Any]]:
    final = {k: v for k, v in config.items() if k != "quantization_config"}
    if layout != "quantized":
        if layout == "fp8":
            final["quantization_config"] = {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "weight_block_size": [128, 128],
            }
        return list(source_tensors(config, layout)), final
    assert recipe is not None
    bits = plan_bits(config, recipe)
    q = recipe.quantize
    tensors = list(
        quantized_tensors(config, bits, q.group_size, mtp=q.mtp == "keep", vision=q.vision == "keep")
    )
    final["quantization_config"] = quantization_config(bits, recipe)
    if q.vision == "drop":
        final["language_model_only"] = True
    return tensors, final


def _split(tensors: Iterable[Expected], limit: int) -> list[list[Expected]]:
    shards: list[list[Expected]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + _bytes(tensor) > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += _bytes(tensor)
    return shards


def _write_sparse(path: Path, tensors: list[Expected], shape: ModelShape) -> FileRecord:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for t in tensors:
        header[t.name] = {
            "dtype": t.dtypes[0],
            "shape": list(t.shape),
            "data_offsets": [position, position + _bytes(t)],
        }
        position += _bytes(t)
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    start = 8 + len(raw)
    temporary = path.with_name(path.name + TEMPORARY)
    with writing(path):
        with temporary.open("wb") as f:
            f.write(len(raw).to_bytes(8, "little") + raw)
            for t in tensors:
                offset = header[t.name]["data_offsets"][0]
                os.pwrite(f.fileno(), _content(t, shape), start + offset)
            f.truncate(start + position)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
        fsync_directory(path.parent)
    return FileRecord(start + position, "sparse", len(tensors))


def _content(tensor: Expected, shape: ModelShape) -> bytes:
    """The first bytes of a tensor: plausible values, the same for the same name."""
    assert shape.ngram is not None or not tensor.name.endswith(_CONSTANTS)
    if shape.ngram is not None and tensor.name.endswith(_CONSTANTS):
        index = shape.ngram.layer_ids.index(int(tensor.name.split(".layers.")[1].split(".")[0]))
        values = constants(shape, index)[tensor.name.rpartition(".")[2]]
        return b"".join(int(v).to_bytes(8, "little") for v in values)
    size = min(_bytes(tensor), _REAL_BYTES)
    dtype = tensor.dtypes[0]
    if tensor.name.endswith(".qzeros"):
        return (b"\x55" if classify(tensor.name) is Group.EXPERTS else b"\x7f") * size  # 2 and 8 bits
    start = zlib.crc32(tensor.name.encode()) % _REAL_BYTES // 8 * 8
    return _noise(dtype)[start : start + size]


@lru_cache(maxsize=16)
def _noise(dtype: str) -> bytes:
    """Two windows of plausible values of a dtype; each tensor takes one from its own place in it."""
    noise = np.random.default_rng(0).integers(0, 256, 2 * _REAL_BYTES, dtype=np.uint8)
    if dtype in _EXPONENTS:
        noise[ITEM_BITS[dtype] // 8 - 1 :: ITEM_BITS[dtype] // 8] = _EXPONENTS[dtype]
    if dtype == "F8_E4M3":
        noise &= 0xBF  # below the NaN codes 0x7F and 0xFF
    return noise.tobytes()


def _bytes(tensor: Expected) -> int:
    return math.prod(tensor.shape) * ITEM_BITS[tensor.dtypes[0]] // 8
