"""The header of a safetensors file, checked against the file it describes.

Layout (https://github.com/huggingface/safetensors#format): u64 little-endian header length, that
many bytes of JSON, then the data; offsets in the JSON count from the start of the data.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from q38.base.errors import InputError

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64,
}  # fmt: skip
MAX_HEADER = 100_000_000  # the limit of the format's reference implementation
_REDOWNLOAD = "download the file again"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as the header describes it. `begin` and `end` are absolute file offsets in bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """All tensors of one file, in file order."""

    file: Path
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    data_start: int
    raw: bytes


def read_header(file: Path) -> Header:
    """Read and check one header.

    Raises:
        InputError: the file is missing, empty, truncated, over-long, or its header does not
            describe its data (bad JSON, unknown dtype, overlapping or shifted offsets).
    """
    try:
        with file.open("rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            if size == 0:
                raise InputError("the file is empty", where=file, remedy=_REDOWNLOAD)
            if size < 8:
                raise InputError(
                    f"the file ends after {size} bytes, inside its header", where=file, remedy=_REDOWNLOAD
                )
            (length,) = struct.unpack("<Q", f.read(8))
            if length > MAX_HEADER or length < 2:
                raise InputError(
                    f"not a safetensors file (header length {length})", where=file, remedy=_REDOWNLOAD
                )
            if 8 + length > size:
                raise InputError(
                    f"the file ends inside its header ({size} of {8 + length} bytes)",
                    where=file,
                    remedy=_REDOWNLOAD,
                )
            raw = f.read(length)
    except FileNotFoundError:
        raise InputError("no such file", where=file, remedy=_REDOWNLOAD) from None
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=file, remedy="check its permissions"
        ) from None
    return _parse(file, raw, size)


def _parse(file: Path, raw: bytes, size: int) -> Header:
    try:
        entries = json.loads(raw)
        if isinstance(entries, dict) and raw.count(b'"data_offsets"') > len(
            entries.keys() - {"__metadata__"}
        ):
            # A tensor is there twice: parse again with the hook that names it, too slow for 200,000 tensors.
            json.loads(raw, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the header is not valid JSON ({error})", where=file, remedy=_REDOWNLOAD) from None
    if not isinstance(entries, dict):
        raise InputError("the header is not a JSON object", where=file, remedy=_REDOWNLOAD)
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise InputError("__metadata__ in the header is not an object", where=file, remedy=_REDOWNLOAD)
    data_start = 8 + len(raw)
    found = [_tensor(file, name, entry, data_start) for name, entry in entries.items()]
    found.sort(key=attrgetter("begin", "end"))
    position = data_start
    for info in found:
        if info.begin != position:
            kind = "overlaps another tensor" if info.begin < position else "leaves a gap"
            raise InputError(
                f"tensor {info.name} {kind} at byte {info.begin}", where=file, remedy=_REDOWNLOAD
            )
        position = info.end
    if position != size:
        kind = "is truncated" if size < position else "has trailing bytes"
        raise InputError(
            f"the file {kind}: {size} bytes, its header describes {position}", where=file, remedy=_REDOWNLOAD
        )
    return Header(file, {info.name: info for info in found}, metadata, data_start, raw)


def _tensor(file: Path, name: str, entry: Any, data_start: int) -> TensorInfo:
    try:
        dtype, shape = entry["dtype"], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        good = isinstance(dtype, str) and _all_counts(shape) and _all_counts((begin, end))
    except (TypeError, KeyError, ValueError):
        good = False
    if not good:
        raise InputError(f"tensor {name} has a malformed header entry", where=file, remedy=_REDOWNLOAD)
    if dtype not in ITEM_BITS:
        raise InputError(
            f"tensor {name} has unknown dtype {dtype}", where=file, remedy=f"known: {', '.join(ITEM_BITS)}"
        )
    expected = math.prod(shape) * ITEM_BITS[dtype] // 8
    if end - begin != expected:
        raise InputError(
            f"tensor {name} spans {end - begin} bytes, {dtype} {list(shape)} needs {expected}",
            where=file,
            remedy=_REDOWNLOAD,
        )
    return TensorInfo(name, dtype, shape, file, data_start + begin, data_start + end)


def _all_counts(values: tuple[Any, ...]) -> bool:
    for value in values:  # noqa: SIM110 (a generator costs three times as much here)
        if type(value) is not int or value < 0:
            return False
    return True


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"key {key} appears twice")
        result[key] = value
    return result
