"""Finished experts of the block in hand on disk, so that a killed run repeats at most one batch of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from q38.checkpoint.packing import PackedMatrix
from q38.checkpoint.writer import write_safetensors

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


class Expert(NamedTuple):
    """One finished expert: its three matrices, and what was measured (None where it was not tuned)."""

    gate_proj: PackedMatrix
    up_proj: PackedMatrix
    down_proj: PackedMatrix
    before: float | None
    after: float | None
    best: int | None


class Store:
    """Files `experts-BLOCK-BATCH.safetensors` in one directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def save(self, block: int, batch: int, experts: dict[int, Expert]) -> None:
        """Write one batch atomically."""
        tensors, measured = {}, {}
        for e, expert in experts.items():
            for projection in PROJECTIONS:
                matrix: PackedMatrix = getattr(expert, projection)
                for field, tensor in matrix._asdict().items():
                    tensors[f"{e}.{projection}.{field}"] = tensor
            measured[str(e)] = json.dumps([expert.before, expert.after, expert.best])
        write_safetensors(self._path(block, batch), tensors, measured)

    def load(self, block: int, batch: int) -> dict[int, Expert] | None:
        """A batch that an earlier process finished, None if it did not."""
        path = self._path(block, batch)
        if not path.exists():
            return None
        experts = {}
        with safe_open(str(path), "pt") as file:
            for e, measured in file.metadata().items():
                gate, up, down = (
                    PackedMatrix(*(file.get_tensor(f"{e}.{name}.{field}") for field in PackedMatrix._fields))
                    for name in PROJECTIONS
                )
                experts[int(e)] = Expert(gate, up, down, *json.loads(measured))
        return experts

    def clear(self) -> None:
        """Remove every batch: the block's shard has them."""
        for path in self._directory.glob("experts-*-*.safetensors"):
            path.unlink()

    def _path(self, block: int, batch: int) -> Path:
        return self._directory / f"experts-{block}-{batch}.safetensors"
