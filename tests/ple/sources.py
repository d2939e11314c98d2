"""Checkpoints that hold an n-gram table and nothing else: all that split-ple looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.writer import write_safetensors
from q38.model.ngram import table_rows
from q38.model.shape import ModelShape

PREFIX = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding"


def config(vocab_base: int = 1250, **text: Any) -> dict[str, Any]:
    sizes = {
        "hidden_size": 256, "vocab_size": 2048, "num_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "hc_count": 4,
        "hc_lowrank": 32, "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 64,
        "indexer_budget": 64, "indexer_compress_ratio": 4,
    }  # fmt: skip
    layers = ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
    ngram = {
        "ple_layer_ids": [2],
        "ngram_vocab_size_base": vocab_base,
        "eos_token_id": 0,
        "split_ngram_parts": 12,
    }
    return {"model_type": "qwen4_exp", "text_config": {**sizes, "layer_types": layers, **ngram, **text}}


def make_source(
    path: Path, *, vocab_base: int = 1250, parts: int = 12, fp8: bool = False, files: int = 3, seed: int = 0
) -> Path:
    """A bf16 (or fp8 with a scale) table of `parts` shards, spread over `files` files."""
    path.mkdir(parents=True)
    raw = config(vocab_base)
    ngram = ModelShape.from_config(raw).ngram
    assert ngram is not None
    generator = torch.Generator().manual_seed(seed)
    sizes = [len(part) for part in torch.arange(table_rows(ngram)).tensor_split(parts)]
    tensors = {}
    for n, rows in enumerate(sizes):
        values = torch.randn(rows, ngram.dim, generator=generator) * 0.02
        tensors[f"{PREFIX}.shard_{n}.weight"] = (
            (values * 4000).to(torch.float8_e4m3fn) if fp8 else values.bfloat16()
        )
    if fp8:
        tensors[f"{PREFIX}.weight_scale"] = torch.tensor([1 / 4096], dtype=torch.bfloat16)
    weight_map = {}
    for i in range(files):
        name = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = dict(list(tensors.items())[i::files])
        write_safetensors(path / name, part)
        weight_map |= dict.fromkeys(part, name)
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps(raw))
    return path


def poisoned(source: Path, *, row: int) -> Path:
    """The same checkpoint, in place, with a NaN in this row of shard 4."""
    checkpoint = Checkpoint.open(source)
    name = f"{PREFIX}.shard_4.weight"
    file = checkpoint.info(name).file
    tensors = {n: checkpoint.read(n) for n in checkpoint.headers[file.name].tensors}
    tensors[name].view(torch.uint8).view(tensors[name].shape[0], -1)[row, -1] = 0x7F
    tensors[name].view(torch.uint8).view(tensors[name].shape[0], -1)[row, -2] = 0xFF
    write_safetensors(file, tensors)
    return source
