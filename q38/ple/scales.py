"""Scales of an fp8 table that has one per row: float32 [rows] in a file of their own, rows in the table's order.

The release has one scale for the whole table. A table with a scale per row is carried over all the same, because its
codes mean nothing without them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import ITEM_BITS, TensorInfo
from q38.checkpoint.writer import FileRecord, atomic_file
from q38.ple.stream import CHUNK, read_range, read_tensors

FILE = "ple.scales.f32.bin"
DTYPES = ("BF16", "F16", "F32")
ITEM = 4  # bytes of a stored scale
_SAMPLE = 64  # places where a sampled comparison looks
_RUN = 256  # scales compared at each


def as_float32(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Stored scales (BF16, F16 or F32) as float32, without rounding."""
    if dtype == "BF16":  # the upper half of float32
        return (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return data.view(np.float16 if dtype == "F16" else np.float32).astype(np.float32)


def write_scales(file: Path, tensor: TensorInfo, progress: Progress = SILENT) -> FileRecord:
    """Write the source's scales as float32.

    Raises:
        InputError: a scale is not a finite positive number.
        ResourceError: the disk is full.
    """
    with atomic_file(file) as out, progress.task("split-ple: scales", tensor.nbytes) as task:
        for piece in read_tensors({0: tensor}, lambda data: as_float32(data, tensor.dtype), CHUNK):
            good = np.isfinite(piece.value) & (piece.value > 0)
            if not good.all():
                row = piece.start * 8 // ITEM_BITS[tensor.dtype] + int(np.argmin(good))
                raise InputError(
                    f"tensor {tensor.name}: the scale of row {row} is {piece.value[np.argmin(good)]}, "
                    "not a finite positive number",
                    where=tensor.file,
                    remedy="download the file again",
                )
            out.write(piece.value.view(np.uint8).data)
            task.advance(piece.nbytes)
    return out.record()


def compare_scales(file: Path, tensor: TensorInfo, *, full: bool, seed: int = 0) -> None:
    """Compare the written scales with the source's, all of them or 64 runs of 256.

    Raises:
        CheckFailed: one differs; the first row is named.
    """
    rows, width = tensor.numel, ITEM_BITS[tensor.dtype] // 8
    starts = np.arange(0, rows, _RUN)
    if not full:
        starts = np.random.default_rng(seed).choice(starts, min(_SAMPLE, len(starts)), replace=False)
    with file.open("rb", buffering=0) as ours, tensor.file.open("rb", buffering=0) as theirs:
        for start in starts.tolist():
            stop = min(start + _RUN, rows)
            data = read_range(theirs.fileno(), tensor, start * width, stop * width)
            ours.seek(start * ITEM)
            found = np.frombuffer(ours.read((stop - start) * ITEM), np.float32)
            wanted = as_float32(data, tensor.dtype)
            if not np.array_equal(found, wanted):
                differs = found != wanted if len(found) == len(wanted) else np.ones(1, bool)
                raise CheckFailed(
                    f"the scale of row {start + int(np.argmax(differs))} differs from {tensor.name}",
                    where=file,
                    remedy="make the table again with q38 split-ple --fresh",
                )
