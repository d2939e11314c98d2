"""The source's weights, by the module names of a packed checkpoint, whatever the source's layout.

A packed checkpoint has one matrix per expert. A source may fuse all experts of a block into two 3-D
tensors (bf16 release), or store each expert in fp8 with a scale per block of weights (FP8 release).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from q38.base.errors import InputError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import Checkpoint, to_torch_dtype
from q38.model.names import EXPERT


@dataclass(frozen=True)
class SourceWeights:
    """Random access to rows of the source's matrices, in float32."""

    checkpoint: Checkpoint

    def shape(self, module: str) -> tuple[int, int] | None:
        """[N out, K in] of a module's matrix; None if the source has none.

        Raises:
            InputError: it is stored as fp8 codes without their scales.
        """
        place = self._place(module)
        return None if place is None else (place.rows, place.columns)

    def rows(self, module: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a module's matrix: float32 [stop - start, K].

        Raises:
            InputError: the source has no such matrix, or its file is damaged.
        """
        place = self._place(module)
        if place is None:
            self.checkpoint.info(f"{module}.weight")  # raises
            raise AssertionError(module)
        scales = f"{module}.weight_scale_inv"
        if scales in self.checkpoint.tensors:
            codes = self.checkpoint.read(place.tensor)
            return dequantize_blocks(codes, self.checkpoint.read(scales))[start:stop].float()
        row = place.columns * ITEM_BITS[place.dtype] // 8
        first = place.offset + start * row
        data = self.checkpoint.read_bytes(place.tensor, first, first + (stop - start) * row)
        return (
            torch.frombuffer(data, dtype=to_torch_dtype(place.dtype))
            .view(stop - start, place.columns)
            .float()
        )

    def _place(self, module: str) -> _Place | None:
        tensors = self.checkpoint.tensors
        if (info := tensors.get(f"{module}.weight")) is not None:
            if not info.numel or not info.shape:
                return None
            if info.dtype.startswith("F8") and f"{module}.weight_scale_inv" not in tensors:
                raise InputError(
                    f"tensor {info.name} is fp8 and has no weight_scale_inv, so its values are unknown",
                    where=info.file,
                    remedy="download the shard that holds its scales, or give the bf16 release",
                )
            return _Place(info.name, info.dtype, info.shape[0], info.numel // info.shape[0], 0)
        match = EXPERT.match(module)
        if match is None:
            return None
        projection, expert = match["proj"], int(match["expert"])
        fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
        info = tensors.get(f"{match['layer']}.mlp.experts.{fused}")
        if info is None or len(info.shape) != 3 or expert >= info.shape[0]:
            return None
        _, rows, columns = info.shape
        matrix = rows * columns * ITEM_BITS[info.dtype] // 8
        if projection == "down_proj":
            return _Place(info.name, info.dtype, rows, columns, expert * matrix)
        half = matrix // 2 if projection == "up_proj" else 0
        return _Place(info.name, info.dtype, rows // 2, columns, expert * matrix + half)


@dataclass(frozen=True)
class _Place:
    """A matrix inside a tensor; `offset` in bytes from the start of the tensor."""

    tensor: str
    dtype: str
    rows: int
    columns: int
    offset: int
