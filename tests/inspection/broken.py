"""Checkpoints broken in one way each, quickly: shards are hard links until they are rewritten."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.writer import write_safetensors


def clone(source: Path, out: Path) -> Path:
    """A copy that may be broken. Shards share their bytes with `source`: replace them, never write into them."""
    out.mkdir(parents=True)
    for file in source.iterdir():
        (os.link if file.suffix == ".safetensors" else shutil.copy)(file, out / file.name)
    return out


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def edit_config(root: Path, **values: Any) -> None:
    edit_json(root / "config.json", lambda c: c.update(values))


def edit_text_config(root: Path, **values: Any) -> None:
    edit_json(root / "config.json", lambda c: c["text_config"].update(values))


def edit_tensors(root: Path, change: Callable[[dict[str, torch.Tensor]], object], *, file_of: str) -> None:
    """Rewrite the shard that holds `file_of` after `change(its tensors)`, and its share of the index."""
    checkpoint = Checkpoint.open(root)
    file = checkpoint.info(file_of).file
    names = list(checkpoint.headers[file.name].tensors)
    tensors = {name: checkpoint.read(name) for name in names}
    change(tensors)
    if tensors:
        write_safetensors(file, {name: t.contiguous() for name, t in tensors.items()})
    else:
        file.unlink()

    def reindex(index: dict[str, Any]) -> None:
        for name in names:
            index["weight_map"].pop(name)
        index["weight_map"] |= dict.fromkeys(tensors, file.name)
        index["metadata"] = {}

    edit_json(root / INDEX, reindex)


def edit_tensor(root: Path, name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Replace one tensor by `change(tensor)`; None removes it."""

    def apply(tensors: dict[str, torch.Tensor]) -> None:
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    edit_tensors(root, apply, file_of=name)


def drop(root: Path, name: str) -> None:
    edit_tensor(root, name, lambda t: None)


def drop_where(root: Path, unwanted: Callable[[str], bool]) -> None:
    """Remove every tensor whose name is unwanted."""
    for name in [n for n in Checkpoint.open(root).tensors if unwanted(n)]:
        if name in Checkpoint.open(root).tensors:
            edit_tensors(root, lambda t: [t.pop(n) for n in list(t) if unwanted(n)], file_of=name)


def damage(file: Path, change: Callable[[bytearray], object]) -> None:
    """Change bytes of a shard of the clone only."""
    content = bytearray(file.read_bytes())
    file.unlink()
    change(content)
    file.write_bytes(content)
