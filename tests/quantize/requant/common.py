"""What the tests of requant-int8 share: the recipe, digests of a directory, a changed tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.writer import write_safetensors
from q38.model.names import Group
from q38.recipe.schema import Recipe, parse_recipe

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


def recipe_with_indexer() -> Recipe:
    """Re-packs the indexer too, which is a sensitive group."""
    quantize = {**BASE["quantize"], "allow_low": [Group.INDEXER]}
    return parse_recipe({**BASE, "quantize": quantize, "requant_int8": {"groups": ["gdn_out", "indexer"]}})


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
