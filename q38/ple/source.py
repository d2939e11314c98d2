"""The n-gram table as a checkpoint holds it: shards in numeric order, dtype and scale, checked against config.json."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from q38.base.errors import InputError
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint, fingerprint_file
from q38.model.names import LAYERS, NGRAM_SCALE, NGRAM_SHARD
from q38.model.ngram import table_rows
from q38.model.shape import ModelShape
from q38.ple.scales import DTYPES

BF16, FP8 = "BF16", "F8_E4M3"
_RESTORE = "download the checkpoint again, or run q38 inspect on it"


@dataclass(frozen=True)
class TableSource:
    """Where the rows of the one n-gram table are.

    `scale` multiplies fp8 codes, or the tensor `row_scales` (BF16, F16 or F32, [rows] or [rows, 1]) has one
    scale per row. Both None for bf16.
    """

    checkpoint: Checkpoint
    layer: int
    shards: tuple[TensorInfo, ...]
    dtype: str
    dim: int
    scale: float | None
    row_scales: TensorInfo | None = None

    @property
    def rows_per_shard(self) -> list[int]:
        return [s.shape[0] for s in self.shards]

    @property
    def rows(self) -> int:
        return sum(self.rows_per_shard)

    @property
    def nbytes(self) -> int:
        return sum(s.nbytes for s in self.shards)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hash of each file that holds a part of the table (see `fingerprint_file`)."""
        parts = (*self.shards, *([self.row_scales] if self.row_scales else []))
        files = sorted({part.file for part in parts})
        return {f.name: fingerprint_file(f, header=self.checkpoint.headers[f.name].raw) for f in files}


def find_table(checkpoint: Checkpoint) -> TableSource:
    """Locate and check the table.

    Raises:
        InputError: the config has no or several PLE layers; a shard is missing, doubled, of another
            dtype or width; the row count is not the one derived from the config; an fp8 table has no
            usable scale.
    """
    config = checkpoint.path / "config.json"
    shape = ModelShape.from_config(checkpoint.config, where=str(config))
    if shape.ngram is None:
        raise InputError(
            "the model has no n-gram table (no ple_layer_ids)", where=config, remedy="skip this step"
        )
    if len(shape.ngram.layer_ids) != 1:
        raise InputError(
            f"{len(shape.ngram.layer_ids)} n-gram tables (ple_layer_ids {[i + 1 for i in shape.ngram.layer_ids]}), "
            "q38 handles models with one",
            where=config,
            remedy="restore text_config.ple_layer_ids of the release",
        )
    layer = shape.ngram.layer_ids[0]
    shards = _shards(checkpoint, layer)
    first = shards[0]
    for shard in shards:
        if len(shard.shape) != 2 or shard.shape[1] != shape.ngram.dim:
            raise InputError(
                f"tensor {shard.name} has shape {list(shard.shape)}, rows of {shape.ngram.dim} values expected",
                where=shard.file,
                remedy=_RESTORE,
            )
        if shard.dtype != first.dtype:
            raise InputError(
                f"tensor {shard.name} is {shard.dtype}, shard 0 is {first.dtype}",
                where=shard.file,
                remedy=_RESTORE,
            )
    if first.dtype not in (BF16, FP8):
        raise InputError(
            f"the n-gram table is {first.dtype}", where=first.file, remedy=f"known: {BF16}, {FP8}"
        )
    rows, expected = sum(s.shape[0] for s in shards), table_rows(shape.ngram)
    if rows != expected:
        raise InputError(
            f"the n-gram table has {rows} rows in {len(shards)} shards, config.json asks for {expected}",
            where=checkpoint.path,
            remedy=_RESTORE,
        )
    scale, row_scales = _scales(checkpoint, layer, rows) if first.dtype == FP8 else (None, None)
    return TableSource(checkpoint, layer, shards, first.dtype, shape.ngram.dim, scale, row_scales)


def _shards(checkpoint: Checkpoint, layer: int) -> tuple[TensorInfo, ...]:
    # Either spelling of the prefix (release or text-only): the layer number decides.
    found: dict[int, TensorInfo] = {}
    for info in checkpoint.tensors.values():
        if f".{layer}.ple." not in info.name:
            continue
        if info.name.endswith(".ngram_embedding.weight"):
            return (info,)
        if match := NGRAM_SHARD.match(info.name):
            n = int(match["n"])
            if n in found:
                raise InputError(
                    f"shard {n} of the n-gram table is there twice ({found[n].name} and {info.name})",
                    where=info.file,
                    remedy=_RESTORE,
                )
            found[n] = info
    if not found:
        raise InputError(
            f"holds no n-gram table ({LAYERS}.{layer}.ple...shard_*.weight)",
            where=checkpoint.path,
            remedy="give the source checkpoint; a quantized one keeps its table in a ple directory",
        )
    missing = next((n for n in range(max(found) + 1) if n not in found), None)
    if missing is not None:
        raise InputError(
            f"shard {missing} of {max(found) + 1} of the n-gram table is missing",
            where=checkpoint.path,
            remedy=_RESTORE,
        )
    return tuple(found[n] for n in sorted(found))


def _scales(checkpoint: Checkpoint, layer: int, rows: int) -> tuple[float | None, TensorInfo | None]:
    """The one scale, or the tensor that has one per row."""
    for info in checkpoint.tensors.values():
        if NGRAM_SCALE.search(info.name) and f".{layer}.ple." in info.name:
            if rows > 1 and info.shape in ((rows,), (rows, 1)) and info.dtype in DTYPES:
                return None, info
            value = checkpoint.read(info.name).float().reshape(-1) if info.numel == 1 else None
            if value is None or not math.isfinite(value.item()) or value.item() <= 0:
                raise InputError(
                    f"tensor {info.name} is not one finite positive number, nor one per row",
                    where=info.file,
                    remedy=_RESTORE,
                )
            return value.item(), None
    raise InputError(
        "the n-gram table is fp8 and its weight_scale is missing, so its values are unknown",
        where=checkpoint.path,
        remedy="download the shard that holds ngram_embedding.weight_scale",
    )
