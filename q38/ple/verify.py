"""Is a split table what its source says? Sampled or in full."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint
from q38.ple import scales
from q38.ple.cast import Cast, first_not_finite
from q38.ple.find import PLE_JSON, find_ple
from q38.ple.source import BF16, FP8, TableSource, find_table
from q38.ple.stream import CHUNK, read_range, read_tensors
from q38.ple.table import PleInfo, read_info

SAMPLE = 64  # rows per shard
_REBUILD = "make the table again with q38 split-ple --fresh"


def verify_ple(
    directory: Path,
    *,
    against: Path | None = None,
    full: bool = False,
    seed: int = 0,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Check a split table.

    Without `against`: ple.json and the file's size; with `full` its sha256. With `against` (a
    checkpoint): its rows too, 64 of each shard picked by `seed`, or with `full` all of them.

    Returns:
        {"rows_compared", "sha256_checked", "ok": True}.

    Raises:
        CheckFailed: the sha256 or a row differs (the first is named), or a row holds a value that is no number.
        InputError: ple.json or the source cannot be used, or they are of different tables.
    """
    found = find_ple(directory, directory)
    assert found is not None
    info = read_info(found)
    table_file = found / info.file
    if full:
        _check_hash(table_file, info.bytes, info.sha256, progress)
        if info.row_scales is not None:
            stored = info.row_scales
            _check_hash(found / stored["file"], info.rows * scales.ITEM, stored.get("sha256"), progress)
    compared = 0
    if against is not None:
        source = find_table(Checkpoint.open(against))
        _check_same_table(found, info, source)
        if full:
            compared = _compare_all(table_file, source, info, progress)
        else:
            compared = compare_table(table_file, source, info.dtype, info.weight_scale, seed=seed)
        if info.row_scales is not None and source.row_scales is not None:
            scales.compare_scales(found / info.row_scales["file"], source.row_scales, full=full, seed=seed)
    return {"rows_compared": compared, "sha256_checked": full, "ok": True}


def compare_table(file: Path, source: TableSource, stored: str, scale: float | None, *, seed: int = 0) -> int:
    """Compare 64 rows of each shard (its first and last among them) bit for bit. Returns the number of rows.

    Raises:
        CheckFailed: a row differs, or holds a value that is no number.
    """
    convert = _conversion(source, stored, scale)
    generator = np.random.default_rng(seed)
    row_bytes = source.dim * (1 if stored == FP8 else 2)
    compared, first_row = 0, 0
    with file.open("rb", buffering=0) as f:
        for shard in source.shards:
            count, width = shard.shape[0], shard.nbytes // shard.shape[0]
            rows = np.unique(np.concatenate([[0, count - 1], generator.integers(0, count, SAMPLE - 2)]))
            with shard.file.open("rb", buffering=0) as s:
                for row in rows.tolist():
                    expected = convert(read_range(s.fileno(), shard, row * width, (row + 1) * width))
                    actual = np.frombuffer(
                        os.pread(f.fileno(), row_bytes, (first_row + row) * row_bytes), np.uint8
                    )
                    if not np.array_equal(actual, expected):
                        raise CheckFailed(
                            f"row {first_row + row} differs from {shard.name}", where=file, remedy=_REBUILD
                        )
                    _require_finite(actual, stored, shard, row * source.dim)
            compared += len(rows)
            first_row += count
    return compared


def _compare_all(file: Path, source: TableSource, info: PleInfo, progress: Progress) -> int:
    convert = _conversion(source, info.dtype, info.weight_scale)
    row_bytes = info.bytes // info.rows
    with file.open("rb") as f, progress.task("split-ple: compare", source.nbytes) as task:
        for piece in read_tensors(dict(enumerate(source.shards)), convert, CHUNK):
            at = f.tell()
            actual = np.frombuffer(f.read(len(piece.value)), np.uint8)
            if not np.array_equal(actual, piece.value):
                place = at + int(np.argmax(actual != piece.value)) if len(actual) == len(piece.value) else at
                raise CheckFailed(
                    f"row {place // row_bytes} differs from {piece.tensor.name}", where=file, remedy=_REBUILD
                )
            _require_finite(
                actual, info.dtype, piece.tensor, piece.start * piece.tensor.numel // piece.tensor.nbytes
            )
            task.advance(piece.nbytes)
    return info.rows


def _require_finite(data: NDArray[np.uint8], dtype: str, shard: TensorInfo, at: int) -> None:
    """Refuse stored bytes with a value that is no number; `at` is the value of the shard that they begin with."""
    bad = first_not_finite(data, dtype)
    if bad is not None:
        raise CheckFailed(
            f"row {(at + bad) // shard.shape[1]} of {shard.name} holds NaN or infinity",
            where=shard.file,
            remedy="download the file again",
        )


def _conversion(
    source: TableSource, stored: str, scale: float | None
) -> Callable[[NDArray[np.uint8]], NDArray[np.uint8]]:
    """Source bytes -> stored bytes (uint8)."""
    if (source.dtype, stored) != (BF16, FP8):
        return lambda data: data
    assert scale is not None
    cast = Cast(scale)

    def convert(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return cast(data.view(np.uint16))

    return convert


def _check_same_table(directory: Path, info: PleInfo, source: TableSource) -> None:
    if (info.rows, info.dim) != (source.rows, source.dim):
        raise InputError(
            f"{info.rows} rows of {info.dim} values, the source's table has {source.rows} of {source.dim}",
            where=directory / PLE_JSON,
            remedy="give the checkpoint that the table was split from",
        )
    if (info.row_scales is None) != (source.row_scales is None):
        has = "one scale per row" if source.row_scales else "no scales per row"
        raise CheckFailed(f"the source has {has}", where=directory / PLE_JSON, remedy=_REBUILD)
    if source.dtype == FP8 and info.weight_scale != source.scale:
        raise CheckFailed(
            f"weight_scale is {info.weight_scale}, the source's is {source.scale}",
            where=directory / PLE_JSON,
            remedy=_REBUILD,
        )


def _check_hash(file: Path, size: int, sha256: object, progress: Progress) -> None:
    digest = hashlib.sha256()
    with file.open("rb") as f, progress.task("split-ple: sha256", size) as task:
        while data := f.read(CHUNK):
            digest.update(data)
            task.advance(len(data))
    if digest.hexdigest() != sha256:
        raise CheckFailed("its sha256 is not the one in ple.json", where=file, remedy=_REBUILD)
