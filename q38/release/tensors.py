"""How far the weights of two checkpoints are apart, matrix by matrix, in pieces of bounded size.

Packed matrices are compared as the weights they stand for, so that two widths, or a packed and a plain
matrix, can be held against each other; and by their codes where the width is the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from q38.base.errors import InputError
from q38.checkpoint.header import ITEM_BITS, TensorInfo
from q38.checkpoint.index import Checkpoint, to_torch_dtype
from q38.checkpoint.packing import WORD, dequantize, unpack
from q38.checkpoint.source import SourceWeights
from q38.measure.checks import finite
from q38.measure.matrices import Matrix, find_matrices
from q38.model.names import PACKED_SUFFIXES

PIECE = 4 * 2**20  # weights in hand at a time
HIGH = 16
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Distance:
    """What was found for one tensor or matrix.

    state: "changed", "only in A", "only in B", "shape" or "dtype".
    changed, of: codes of a packed matrix where both have the same width, else values.
    max_abs, relative_error: of the weights, ||a - b|| / ||a||; None where they cannot be subtracted, and
        max_abs also where one of the two values is not finite.
    """

    name: str
    state: str
    a: str
    b: str
    unit: str = "values"
    changed: int | None = None
    of: int | None = None
    max_abs: float | None = None
    squared_difference: float = 0.0
    squared_weight: float = 0.0

    @property
    def relative_error(self) -> float | None:
        if self.max_abs is None:
            return None
        if self.squared_weight == 0.0:
            return 0.0 if self.squared_difference == 0.0 else None
        return finite((self.squared_difference / self.squared_weight) ** 0.5)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Count a piece of weights, float32 [n] each, into the sums."""
        difference = (a - b).abs_()
        difference[(a == b) | (a.isnan() & b.isnan())] = 0.0
        difference[difference.isnan()] = torch.inf
        self.max_abs = max(self.max_abs or 0.0, float(difference.max())) if difference.numel() else 0.0
        self.squared_difference += float(difference.square_().sum(dtype=torch.float64))
        self.squared_weight += float(a.square().sum(dtype=torch.float64))

    def to_dict(self) -> dict[str, Any]:
        return {
            "tensor": self.name,
            "state": self.state,
            "a": self.a,
            "b": self.b,
            "unit": self.unit,
            "changed": self.changed,
            "of": self.of,
            "max_abs": None if self.max_abs is None else finite(self.max_abs),
            "relative_error": self.relative_error,
        }


@dataclass(frozen=True)
class Side:
    """One of the two checkpoints, whose weights can be read in ranges of output rows."""

    checkpoint: Checkpoint

    @cached_property
    def packed(self) -> dict[str, Matrix]:
        return {matrix.module: matrix for matrix in find_matrices(self.checkpoint)}

    @cached_property
    def _plain(self) -> SourceWeights:
        return SourceWeights(self.checkpoint)

    def shape(self, module: str) -> tuple[int, int] | None:
        """[N out, K in]; None where there is no such matrix."""
        matrix = self.packed.get(module)
        return (matrix.n, matrix.k) if matrix else self._plain.shape(module)

    def bits(self, module: str) -> int:
        matrix = self.packed.get(module)
        return matrix.bits if matrix else HIGH

    def label(self, module: str) -> str:
        """Width and shape in words; a dash where there is no such matrix."""
        shape = self.shape(module)
        return "-" if shape is None else f"{self.bits(module)} bit {shape[0]} x {shape[1]}"

    def weights(self, module: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of a matrix: float32 [stop - start, K]. The bounds are multiples of 32, or N."""
        matrix = self.packed.get(module)
        if matrix is None:
            return self._plain.rows(module, start, stop)
        words, zeros, scales = (
            self._columns(name, start * width // WORD, stop * width // WORD)
            for name, width in zip(matrix.tensors, (WORD, matrix.bits, WORD), strict=True)
        )
        return dequantize(words, zeros, scales, matrix.bits)

    def codes(self, module: str, start: int, stop: int) -> torch.Tensor:
        """The codes of rows [start, stop) of a packed matrix: uint8 [K, stop - start]."""
        matrix = self.packed[module]
        return unpack(self._columns(matrix.tensors[0], start, stop), matrix.bits, matrix.k)

    def same_bytes(self, other: Side, module: str) -> bool:
        """Whether both store a packed matrix in the same bytes."""
        names = [f"{module}{part}" for part in PACKED_SUFFIXES]
        sides = self.checkpoint.tensors, other.checkpoint.tensors
        return all(
            name in sides[0] and name in sides[1] and _same_bytes(sides[0][name], sides[1][name])
            for name in names
        )

    def _columns(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Columns [start, stop) of a tensor [R, C]: [R, stop - start], one read per row."""
        info = self.checkpoint.info(name)
        rows, columns = info.shape
        item = ITEM_BITS[info.dtype] // 8
        buffer = bytearray(rows * (stop - start) * item)
        view, step = memoryview(buffer), (stop - start) * item
        with info.file.open("rb", buffering=0) as f:
            for row in range(rows):
                target = view[row * step : (row + 1) * step]
                if os.preadv(f.fileno(), [target], info.begin + (row * columns + start) * item) != step:
                    raise InputError(
                        f"the file ended inside tensor {name}",
                        where=info.file,
                        remedy="see q38 release check",
                    )
        return torch.frombuffer(buffer, dtype=to_torch_dtype(info.dtype)).view(rows, stop - start)


def compare_matrix(a: Side, b: Side, module: str) -> Distance | None:
    """Two matrices of which at least one is packed; None if they stand for the same weights with the same codes."""
    shapes = a.shape(module), b.shape(module)
    one, other = a.label(module), b.label(module)
    if shapes[0] is None or shapes[1] is None:
        return Distance(module, "only in A" if shapes[1] is None else "only in B", one, other)
    if shapes[0] != shapes[1]:
        return Distance(module, "shape", one, other)
    if a.same_bytes(b, module):
        return None
    n, k = shapes[0]
    same_width = a.bits(module) == b.bits(module) < HIGH
    unit = "codes" if same_width else "values"
    found = Distance(module, "changed", one, other, unit=unit, changed=0, of=n * k)
    for start, stop in _ranges(n, max(PIECE // k // WORD, 1) * WORD):
        x, y = a.weights(module, start, stop), b.weights(module, start, stop)
        found.add(x.flatten(), y.flatten())
        if same_width:
            changed = int((a.codes(module, start, stop) != b.codes(module, start, stop)).sum())
        else:
            changed = int((x != y).sum())
        found.changed = (found.changed or 0) + changed
    return found if found.changed or found.squared_difference else None


def compare_tensor(
    a: TensorInfo, b: TensorInfo, *, scales: tuple[float, float] = (1.0, 1.0)
) -> Distance | None:
    """Two plain tensors; None if their bytes are equal. `scales` multiply the values (of the n-gram table)."""
    labels = describe(a), describe(b)
    if a.shape != b.shape:
        return Distance(a.name, "shape", *labels)
    if scales[0] == scales[1] and _same_bytes(a, b):
        return None
    found = Distance(a.name, "changed" if a.dtype == b.dtype else "dtype", *labels, changed=0, of=a.numel)
    with a.file.open("rb", buffering=0) as one, b.file.open("rb", buffering=0) as other:
        for start, stop in _ranges(a.numel, PIECE):
            x, y = _items(one.fileno(), a, start, stop), _items(other.fileno(), b, start, stop)
            if a.dtype == b.dtype:  # by bits, so that two NaN are equal
                differs = x.view(_INTEGER[x.itemsize]) != y.view(_INTEGER[y.itemsize])
            else:
                differs = x.double() != y.double()
            found.changed = (found.changed or 0) + int(differs.sum())
            found.add(x.float().mul_(scales[0]), y.float().mul_(scales[1]))
    return found


def describe(tensor: TensorInfo) -> str:
    """Dtype and shape in words."""
    return f"{tensor.dtype} {' x '.join(map(str, tensor.shape)) or 'scalar'}"


def changed_names(a: Checkpoint, b: Checkpoint, files: set[str]) -> list[str]:
    """Names of the tensors that lie in one of `files` in A or in B, by name."""
    return sorted({t.name for c in (a, b) for t in c.tensors.values() if t.file.name in files})


def file_as_tensor(file: Path, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    """A file without a header, as one tensor."""
    return TensorInfo(file.name, dtype, shape, file, 0, file.stat().st_size)


def _same_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.file.open("rb", buffering=0) as one, b.file.open("rb", buffering=0) as other:
        return all(
            _read(one.fileno(), a, start, stop) == _read(other.fileno(), b, start, stop)
            for start, stop in _ranges(a.nbytes, PIECE)
        )


def _items(fd: int, tensor: TensorInfo, start: int, stop: int) -> torch.Tensor:
    """Values [start, stop) of a tensor in the order they are stored."""
    width = ITEM_BITS[tensor.dtype] // 8
    data = _read(fd, tensor, start * width, stop * width)
    return torch.frombuffer(data, dtype=to_torch_dtype(tensor.dtype))


def _read(fd: int, tensor: TensorInfo, start: int, stop: int) -> bytearray:
    """Bytes [start, stop) of a tensor."""
    buffer = bytearray(stop - start)
    if os.preadv(fd, [buffer], tensor.begin + start) != stop - start:
        raise InputError(
            f"the file ended inside tensor {tensor.name}", where=tensor.file, remedy="see q38 release check"
        )
    return buffer


def _ranges(size: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(0, size, step):
        yield start, min(start + step, size)
