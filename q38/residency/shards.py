"""Which bytes of a packed checkpoint belong to which expert row, and in what order to read them.

Reading goes by units: a few experts whose tensors lie together in the files. One reader takes one
unit, so each row is complete when its unit is, whatever the order of tensors in the shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint
from q38.model.names import EXPERT
from q38.model.shape import ModelShape
from q38.residency.layout import ExpertLayout

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
KINDS = ("qweight", "scales", "qzeros")
SCALE_DTYPES = ("F16", "BF16")
_PARTS = tuple((proj, kind) for proj in PROJECTIONS for kind in KINDS)
UNIT = 8 * 2**20  # bytes that one reader reads at once
_MERGE = 2**16  # reading over a gap of this many bytes costs less than another request


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of one row. `start` counts from the unit's first byte, extents back to back."""

    row: int
    proj: str
    kind: str
    start: int
    nbytes: int
    name: str


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes [begin, end) of a file."""

    file: Path
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Unit:
    """What one reader reads at once. Pieces are grouped by row."""

    extents: tuple[Extent, ...]
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        return sum(e.end - e.begin for e in self.extents)


Tensors = dict[tuple[str, str], TensorInfo]  # (projection, kind) -> tensor


@dataclass(frozen=True)
class ReadPlan:
    """All tensors by row, and the rows of each unit in file order: those to read. `scale_dtype` is F16 or BF16."""

    rows: list[Tensors]
    groups: list[list[int]]
    scale_dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors to read."""
        return sum(info.nbytes for tensors in self._chosen() for info in tensors.values())

    @property
    def files(self) -> list[Path]:
        """Files that hold them."""
        return sorted({info.file for tensors in self._chosen() for info in tensors.values()})

    @property
    def units(self) -> Iterator[Unit]:
        """The units in order, made as they are asked for: making them all takes as long as reading a gigabyte."""
        return (_unit(group, self.rows) for group in self.groups)

    def only(self, wanted: NDArray[np.bool_], *, unit: int = UNIT) -> ReadPlan:
        """The same, but for the rows in `wanted`, bool [rows]."""
        order = (row for group in self.groups for row in group if wanted[row])
        return replace(self, groups=_groups(self.rows, order, unit))

    def _chosen(self) -> Iterator[Tensors]:
        return (self.rows[row] for group in self.groups for row in group)


def expert_layout(checkpoint: Checkpoint) -> ExpertLayout:
    """The row layout of a packed checkpoint, from its config.

    Raises:
        InputError: not packed, or packed in a way that rows cannot hold (asymmetric, act-order, other widths).
    """
    where = checkpoint.path / "config.json"
    config: Mapping[str, Any] = checkpoint.config.get("quantization_config") or {}
    remedy = "quantize with q38 quantize"
    if config.get("packing_format") != "auto_round:auto_gptq":
        found = config.get("packing_format") or config.get("quant_method") or "nothing"
        raise InputError(
            f"experts are packed as '{found}', not auto_round:auto_gptq", where=where, remedy=remedy
        )
    if config.get("sym") is not True:
        raise InputError("experts are packed with zero points (sym is not true)", where=where, remedy=remedy)
    bits, group = config.get("bits"), config.get("group_size")
    if type(bits) is not int or type(group) is not int or group <= 0:
        raise InputError(
            f"bits {bits!r} and group_size {group!r} are not positive integers", where=where, remedy=remedy
        )
    shape = ModelShape.from_config(checkpoint.config, where=str(where))
    return ExpertLayout.from_shape(shape, group=group, bits=bits)


def plan_reads(checkpoint: Checkpoint, layout: ExpertLayout, *, unit: int = UNIT) -> ReadPlan:
    """Find every tensor of every routed expert and group them into units of about `unit` bytes.

    Experts of the multi-token predictor (mtp.*) are no rows.

    Raises:
        InputError: a tensor is missing, or has another shape or dtype than the layout.
    """
    shape = ModelShape.from_config(checkpoint.config, where=str(checkpoint.path / "config.json"))
    rows = _find(checkpoint, shape)
    scale_dtype = rows[0]["gate_proj", "scales"].dtype
    shapes = {(proj, kind): expected_shape(proj, kind, layout) for proj, kind in _PARTS}
    for tensors in rows:
        for (proj, kind), info in tensors.items():
            _check(info, kind, shapes[proj, kind], scale_dtype)
    order = sorted(range(len(rows)), key=lambda row: min(map(_place, rows[row].values())))
    return ReadPlan(rows, _groups(rows, order, unit), scale_dtype)


def _groups(rows: list[Tensors], order: Iterable[int], unit: int) -> list[list[int]]:
    """Rows in units of about `unit` bytes."""
    groups: list[list[int]] = []
    size = 0
    for row in order:
        nbytes = sum(info.nbytes for info in rows[row].values())
        if not groups or size + nbytes > unit:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += nbytes
    return groups


def _find(checkpoint: Checkpoint, shape: ModelShape) -> list[Tensors]:
    """The nine tensors of each row, by row number."""
    layers, experts = shape.num_layers, shape.num_experts
    rows: list[Tensors] = [{} for _ in range(layers * experts)]
    parts = set(_PARTS)
    found: dict[str, Tensors | None] = {}  # by an expert's prefix: its nine names are taken apart once
    for name, info in checkpoint.tensors.items():
        prefix, *part = name.rsplit(".", 2)
        if (key := tuple(part)) not in parts:
            continue
        if prefix not in found:
            match = None if name.startswith("mtp.") else EXPERT.match(name)
            layer, expert = (int(match["n"]), int(match["expert"])) if match else (layers, experts)
            found[prefix] = rows[layer * experts + expert] if layer < layers and expert < experts else None
        if (tensors := found[prefix]) is not None:
            tensors[key] = info
    missing = [(row, part) for row, tensors in enumerate(rows) for part in _PARTS if part not in tensors]
    if missing:
        row, (proj, kind) = missing[0]
        layer, expert = divmod(row, shape.num_experts)
        more = f" (and {len(missing) - 1} more tensors)" if len(missing) > 1 else ""
        raise InputError(
            f"expert {expert} of layer {layer} lacks {proj}.{kind}{more}",
            where=checkpoint.path,
            remedy="give a checkpoint whose routed experts are all packed",
        )
    return rows


def expected_shape(proj: str, kind: str, layout: ExpertLayout) -> tuple[int, int]:
    """Shape of one packed tensor: qweight [K / codes, N], scales [K / group, N], qzeros [K / group, N / codes]."""
    inputs, outputs = (
        (layout.intermediate, layout.hidden) if proj == "down_proj" else (layout.hidden, layout.intermediate)
    )
    if kind == "qweight":
        return inputs // layout.codes_per_word, outputs
    return inputs // layout.group, outputs if kind == "scales" else outputs // layout.codes_per_word


def _check(info: TensorInfo, kind: str, shape: tuple[int, int], scale_dtype: str) -> None:
    if kind == "scales":
        good = info.dtype == scale_dtype and info.dtype in SCALE_DTYPES
    else:
        good = info.dtype in ("I32", "U32")
    if info.shape == shape and good:
        return
    dtype = "I32" if kind != "scales" else scale_dtype if scale_dtype in SCALE_DTYPES else "F16"
    raise InputError(
        f"tensor {info.name} is {info.dtype} {list(info.shape)}, not {dtype} {list(shape)}",
        where=info.file,
        remedy="quantize all experts alike with q38 quantize",
    )


def _place(info: TensorInfo) -> tuple[str, int]:
    return str(info.file), info.begin


def _unit(group: list[int], rows: list[Tensors]) -> Unit:
    """Merge the tensors of some rows into extents, and say where each lies in the unit."""
    extents: list[list[Any]] = []  # file, begin, end, offset in the unit
    starts: dict[str, int] = {}
    for info in sorted((info for row in group for info in rows[row].values()), key=_place):
        last = extents[-1] if extents else None
        if last and last[0] == info.file and info.begin - last[2] <= _MERGE:
            last[2] = info.end
        else:
            offset = last[3] + last[2] - last[1] if last else 0
            extents.append([info.file, info.begin, info.end, offset])
        _, begin, _, offset = extents[-1]
        starts[info.name] = offset + info.begin - begin
    pieces = tuple(
        Piece(row, proj, kind, starts[info.name], info.nbytes, info.name)
        for row in group
        for (proj, kind), info in sorted(rows[row].items())
    )
    return Unit(tuple(Extent(*e[:3]) for e in extents), pieces)
