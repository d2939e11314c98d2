"""A checkpoint directory that holds random packed experts and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.packing import symmetric_zeros
from q38.checkpoint.writer import write_safetensors
from q38.model.shape import ModelShape
from q38.residency.layout import ExpertLayout
from q38.residency.shards import KINDS, PROJECTIONS, expected_shape, expert_layout
from q38.synth.config import tiny_config

PREFIX = "model.language_model.layers"


def packed_config(
    *, bits: int = 2, group: int = 128, experts: int = 4, intermediate: int = 128
) -> dict[str, object]:
    config = tiny_config(layers=4)
    config["text_config"] |= {"num_experts": experts, "moe_intermediate_size": intermediate}
    config["quantization_config"] = {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": bits, "group_size": group, "sym": True,
    }  # fmt: skip
    return config


def random_experts(
    config: dict[str, object], layout: ExpertLayout, *, seed: int = 0
) -> dict[str, torch.Tensor]:
    """All packed tensors by name, in expert order."""
    shape = ModelShape.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(shape.num_layers):
        for expert in range(shape.num_experts):
            for proj in PROJECTIONS:
                name = f"{PREFIX}.{layer}.mlp.experts.{expert}.{proj}"
                words = expected_shape(proj, "qweight", layout)
                tensors[f"{name}.qweight"] = torch.randint(
                    -(2**31), 2**31, words, dtype=torch.int32, generator=generator
                )
                groups, columns = expected_shape(proj, "scales", layout)
                tensors[f"{name}.scales"] = torch.randn(groups, columns, generator=generator).half()
                tensors[f"{name}.qzeros"] = symmetric_zeros(groups, columns, layout.bits)
    return tensors


def write_checkpoint(
    out: Path, config: dict[str, object], tensors: dict[str, torch.Tensor], shards: Sequence[Sequence[str]]
) -> Checkpoint:
    """Write the named tensors of each shard, in the given order, beside an index."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for i, names in enumerate(shards):
        file = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(out / file, {name: tensors[name] for name in names})
        weight_map |= dict.fromkeys(names, file)
    (out / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return Checkpoint.open(out)


def make_checkpoint(
    out: Path, *, shards: int = 2, **options: int
) -> tuple[Checkpoint, ExpertLayout, dict[str, torch.Tensor]]:
    """A small checkpoint in expert order, cut into shards of equal tensor counts (also within an expert)."""
    config = packed_config(**options)
    out.mkdir(parents=True, exist_ok=True)
    shape = ModelShape.from_config(config)
    layout = ExpertLayout.from_shape(
        shape, group=config["quantization_config"]["group_size"], bits=config["quantization_config"]["bits"]
    )
    tensors = random_experts(config, layout)
    names = list(tensors)
    size = -(-len(names) // shards)
    checkpoint = write_checkpoint(
        out, config, tensors, [names[i : i + size] for i in range(0, len(names), size)]
    )
    assert expert_layout(checkpoint) == layout
    return checkpoint, layout, tensors


def expected_row(
    tensors: dict[str, torch.Tensor], layout: ExpertLayout, layer: int, expert: int
) -> torch.Tensor:
    """uint8 [row_bytes], by the layout's own reference."""
    row = torch.zeros(layout.row_bytes, dtype=torch.uint8)
    name = f"{PREFIX}.{layer}.mlp.experts.{expert}"
    parts = {p: (tensors[f"{name}.{p}.qweight"], tensors[f"{name}.{p}.scales"]) for p in PROJECTIONS}
    layout.fill(row, parts["gate_proj"], parts["up_proj"], parts["down_proj"])
    return row


__all__ = [
    "KINDS",
    "PREFIX",
    "expected_row",
    "make_checkpoint",
    "packed_config",
    "random_experts",
    "write_checkpoint",
]
