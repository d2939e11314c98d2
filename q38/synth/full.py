"""A packed checkpoint of random weights with everything a server needs: for measuring one without the real weights.

Beside the shards: tokenizer, chat template, generation settings, an n-gram table that is a hole (its rows read as
zeros), and the routing profile that its routers were made from.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.base.settings import cpu_count
from q38.base.threads import Advance, spread
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import INDEX, read_json
from q38.checkpoint.job import MANIFEST, Job
from q38.checkpoint.writer import (
    FileRecord,
    atomic_file,
    require_free_space,
    stream_safetensors,
    write_json,
    writing,
)
from q38.data import data_path
from q38.model.expected import Expected, quantized_tensors
from q38.model.ngram import table_rows
from q38.model.shape import ModelShape
from q38.model.text import load_texts
from q38.ple.find import PLE_JSON
from q38.ple.table import PleInfo
from q38.recipe.bits import plan_bits, quantization_config
from q38.recipe.schema import Recipe, load_recipe
from q38.residency import profile
from q38.synth.config import generation_config, tiny_config
from q38.synth.packed_weights import PackedWeights
from q38.synth.tokenizer import special_id, tokenizer_files

PROFILE = "routing-profile.safetensors"
TABLE = "ple.f8_e4m3.bin"
_PROFILE_TOKENS = 100_000  # that the counts of the profile are given for
_PIECE = 2**22  # bytes written at once
_SMALL_HIDDEN = 512
_TEXTS = 4  # every fourth file of the local sources is enough to train the tokenizer on


def plan_full(*, gpu_scale: bool, recipe: str) -> dict[str, Any]:
    """What `synth_full` would write: {"tensors", "tensor_bytes", "table_bytes"}. Writes nothing."""
    config, parsed = _inputs(gpu_scale, recipe)
    tensors, _ = _tensors(config, parsed)
    return {"tensors": len(tensors), **_sizes(config, tensors)}


def synth_full(
    out: Path,
    *,
    gpu_scale: bool = False,
    recipe: str = "quality-24gb",
    seed: int = 0,
    shard_bytes: int = 10**9,
    threads: int | None = None,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write the checkpoint. A killed run goes on with the same call, from the shards that were finished.

    Args:
        out: a new or empty directory.
        gpu_scale: the real model's shape; otherwise the tiny model's, as wide as a GPU needs it.
        recipe: which matrices have how many bits.
        seed: decides which experts are popular.
        shard_bytes: tensor bytes after which a new shard begins.
        threads: shards written at once; all cores by default.

    Returns:
        {"tensors", "tensor_bytes", "table_bytes", "shards"}; table_bytes is the apparent size of the n-gram table.

    Raises:
        InputError: a bad recipe, or `out` holds something else. ResourceError: the disk is full.
    """
    config, parsed = _inputs(gpu_scale, recipe)
    tensors, bits = _tensors(config, parsed)
    final = _final_config(config, bits, parsed)
    identity = {"config": final, "recipe": parsed.to_dict(), "seed": seed, "shard_bytes": shard_bytes}
    with Job(out, "synth full", identity, fresh=fresh) as job:
        if job.up_to_date:
            return dict(read_json(out / MANIFEST)["result"])
        sizes, shards = _sizes(config, tensors), _split(tensors, shard_bytes)
        names = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        todo = {n: s for n, s in zip(names, shards, strict=True) if n not in job.done}
        require_free_space(out, sum(_nbytes(t) for shard in todo.values() for t in shard))
        shape = ModelShape.from_config(config)
        weights = PackedWeights(shape, bits, parsed.quantize.group_size, seed=seed)
        _write_small_files(job, final, shape)
        _write_profile(job, weights)
        _write_shards(job, todo, weights, threads or cpu_count(), progress)
        places = {t.name: name for name, shard in zip(names, shards, strict=True) for t in shard}
        index = {"metadata": {"total_size": sizes["tensor_bytes"]}, "weight_map": places}
        job.commit("index", files={INDEX: write_json(out / INDEX, index)})
        result = {"tensors": len(tensors), **sizes, "shards": len(shards)}
        job.finish(result)
        return result


def _inputs(gpu_scale: bool, recipe: str) -> tuple[dict[str, Any], Recipe]:
    if gpu_scale:
        return read_json(data_path("assets", "models", "qwen3.8-flash-next.json")), load_recipe(recipe)
    config = tiny_config()
    # SGLang's kernels for the hyper-connections take hidden sizes that are multiples of 512.
    config["text_config"] |= {"hidden_size": _SMALL_HIDDEN, "ple_embed_dim": _SMALL_HIDDEN}
    return config, load_recipe(recipe)


def _tensors(config: Mapping[str, Any], recipe: Recipe) -> tuple[list[Expected], dict[str, int]]:
    q = recipe.quantize
    bits = plan_bits(config, recipe)
    if odd := sorted(set(bits.values()) - {2, 8, 16}):
        raise InputError(
            f"matrices of {odd[0]} bits; 2, 8 and 16 are made", where=recipe.name, remedy="use quality-24gb"
        )
    tensors = quantized_tensors(config, bits, q.group_size, mtp=False, vision=False)
    return list(tensors), bits


def _final_config(config: Mapping[str, Any], bits: Mapping[str, int], recipe: Recipe) -> dict[str, Any]:
    """The config of a text model that speaks the synthetic tokenizer."""
    end = special_id("<|endoftext|>")
    text = {**config["text_config"], "bos_token_id": end, "eos_token_id": end}
    for key in ("mtp_num_hidden_layers", "mtp"):
        text.pop(key, None)
    special = {
        "image_token_id": special_id("<|image_pad|>"),
        "video_token_id": special_id("<|video_pad|>"),
        "vision_start_token_id": special_id("<|vision_start|>"),
        "vision_end_token_id": special_id("<|vision_end|>"),
    }
    quantization = quantization_config(bits, recipe)
    return {
        **config,
        **special,
        "text_config": text,
        "language_model_only": True,
        "quantization_config": quantization,
    }


def _sizes(config: Mapping[str, Any], tensors: list[Expected]) -> dict[str, int]:
    ngram = ModelShape.from_config(config).ngram
    return {
        "tensor_bytes": sum(_nbytes(t) for t in tensors),
        "table_bytes": 0 if ngram is None else table_rows(ngram) * ngram.dim,
    }


def _split(tensors: list[Expected], limit: int) -> list[list[Expected]]:
    shards: list[list[Expected]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + _nbytes(tensor) > limit:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += _nbytes(tensor)
    return shards


def _write_small_files(job: Job, config: Mapping[str, Any], shape: ModelShape) -> None:
    if "files" in job.done:
        return
    files = {
        "config.json": write_json(job.out / "config.json", config),
        "generation_config.json": write_json(job.out / "generation_config.json", generation_config()),
    }
    for name, content in tokenizer_files(load_texts("stdlib", "train").texts[::_TEXTS]).items():
        if name == "tokenizer_config.json":
            longest = {"model_max_length": shape.max_position_embeddings}
            content = json.dumps({**json.loads(content), **longest}, indent=1) + "\n"
        with atomic_file(job.out / name) as f:
            f.write(content.encode())
        files[name] = f.record()
    if shape.ngram is not None:
        files |= _write_table(job.out / "ple", shape)
    job.commit("files", files=files)


def _write_table(directory: Path, shape: ModelShape) -> dict[str, FileRecord]:
    """An n-gram table without data on disk."""
    assert shape.ngram is not None
    rows = table_rows(shape.ngram)
    with writing(directory):
        directory.mkdir(exist_ok=True)
        with (directory / TABLE).open("wb") as f:
            f.truncate(rows * shape.ngram.dim)
    parts = shape.ngram.parts
    info = PleInfo(
        file=TABLE, rows=rows, dim=shape.ngram.dim, dtype="F8_E4M3", weight_scale=1.0, bytes=rows * shape.ngram.dim,
        sha256="sparse", layer=shape.ngram.layer_ids[0], n_shards=parts,
        rows_per_shard=[rows // parts + (i < rows % parts) for i in range(parts)], source={"synthetic": "zeros"},
    )  # fmt: skip
    table = FileRecord(info.bytes, "sparse")
    return {f"ple/{TABLE}": table, f"ple/{PLE_JSON}": write_json(directory / PLE_JSON, info.to_dict())}


def _write_profile(job: Job, weights: PackedWeights) -> None:
    if PROFILE in job.done:
        return
    count = np.rint(weights.rates * _PROFILE_TOKENS).astype(np.int64)
    mass = weights.rates * _PROFILE_TOKENS / weights.shape.num_experts_per_tok
    made = profile.Profile(count, mass, _PROFILE_TOKENS, {"text": "synthetic"})
    job.commit(PROFILE, files={PROFILE: profile.save(made, job.out / PROFILE)})


def _write_shards(
    job: Job, todo: Mapping[str, list[Expected]], weights: PackedWeights, threads: int, progress: Progress
) -> None:
    spread(
        {name: partial(_write_shard, job.out / name, shard, weights) for name, shard in todo.items()},
        lambda name, record: job.commit(name, files={name: record}),
        label="synth full",
        total=sum(_nbytes(t) for shard in todo.values() for t in shard),
        workers=threads,
        progress=progress,
    )


def _write_shard(path: Path, tensors: list[Expected], weights: PackedWeights, advance: Advance) -> FileRecord:
    entries = [(t.name, t.dtypes[0], t.shape, _nbytes(t)) for t in tensors]
    record = stream_safetensors(path, entries, _pieces(tensors, weights, advance))
    with path.open("rb") as f:  # the server reads it from the disk, as it would the real one
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return record


def _pieces(tensors: list[Expected], weights: PackedWeights, advance: Advance) -> Iterator[bytearray]:
    """The bytes of all tensors in pieces of some megabytes: a write for each small tensor would cost more than its bytes."""
    piece = bytearray()
    for tensor in tensors:
        for chunk in weights.chunks(tensor):
            piece += chunk
            if len(piece) >= _PIECE:
                yield piece
                advance(len(piece))
                piece = bytearray()
    yield piece
    advance(len(piece))


def _nbytes(tensor: Expected) -> int:
    return math.prod(tensor.shape) * ITEM_BITS[tensor.dtypes[0]] // 8
