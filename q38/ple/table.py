"""ple.json: what a split n-gram table is and where it came from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import read_json
from q38.ple.find import PLE_JSON
from q38.ple.scales import ITEM

SCHEMA = "q38.ple/1"
_REBUILD = "make it again with q38 split-ple"


@dataclass(frozen=True)
class PleInfo:
    """The table file is rows x dim values, row-major, without a header.

    A value is code * weight_scale where dtype is F8_E4M3, and the stored bf16 where it is BF16 (weight_scale null).
    A table with one scale per row has weight_scale null and `row_scales`: file (float32 [rows]), bytes and sha256.
    """

    file: str
    rows: int
    dim: int
    dtype: str
    weight_scale: float | None
    bytes: int
    sha256: str
    layer: int  # zero-based
    n_shards: int
    rows_per_shard: list[int]
    source: dict[str, Any]
    quantization: dict[str, Any] | None = None
    row_scales: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"schema": SCHEMA, **asdict(self)}


def read_info(directory: Path) -> PleInfo:
    """Read ple.json and check it against the size of the table file.

    Raises:
        InputError: a file is missing, a field is missing or senseless, an fp8 table has no scale, or a
            file is of another size.
    """
    path = directory / PLE_JSON
    raw = read_json(path)
    known = {f.name for f in fields(PleInfo)}
    missing = sorted(known - raw.keys() - {"quantization", "row_scales"})
    if missing:
        raise InputError(f"has no {missing[0]}", where=path, remedy=_REBUILD)
    info = PleInfo(**{k: v for k, v in raw.items() if k in known})
    if info.dtype not in ("BF16", "F8_E4M3"):
        raise InputError(f"dtype is '{info.dtype}'", where=path, remedy="known: BF16, F8_E4M3")
    if not all(type(n) is int and n > 0 for n in (info.rows, info.dim, info.bytes)):
        raise InputError("rows, dim and bytes must be positive integers", where=path, remedy=_REBUILD)
    if info.row_scales is not None:
        _check_row_scales(directory, info)
    elif info.dtype == "F8_E4M3" and not _positive(info.weight_scale):
        raise InputError(
            "the table is fp8 and weight_scale is missing, so its values are unknown",
            where=path,
            remedy=_REBUILD,
        )
    expected = info.rows * info.dim * ITEM_BITS[info.dtype] // 8
    table = directory / info.file
    if Path(info.file).name != info.file or not table.is_file():
        raise InputError(f"names the file '{info.file}', which is absent", where=path, remedy=_REBUILD)
    size = table.stat().st_size
    if not size == expected == info.bytes:
        raise InputError(
            f"{size} bytes, {info.rows} rows of {info.dim} {info.dtype} values need {expected}",
            where=table,
            remedy=_REBUILD,
        )
    return info


def _check_row_scales(directory: Path, info: PleInfo) -> None:
    name = info.row_scales.get("file") if isinstance(info.row_scales, dict) else None
    if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
        raise InputError(
            "the file of its row scales is absent, so its values are unknown",
            where=directory / PLE_JSON,
            remedy=_REBUILD,
        )
    size = (directory / name).stat().st_size
    if size != info.rows * ITEM:
        raise InputError(
            f"{size} bytes, {info.rows} float32 scales need {info.rows * ITEM}",
            where=directory / name,
            remedy=_REBUILD,
        )


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0
