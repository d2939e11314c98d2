"""Looking at values: hashes of whole files, and a sample of every tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.inspection.findings import Findings
from q38.inspection.opened import Opened

_SLICE = 16 * 1024  # bytes; four of them a tensor
_SLICES = 4
_READ = 4 * 2**20
_AGAIN = "download the file again"


def check_values(opened: Opened, findings: Findings, progress: Progress = SILENT) -> None:
    """Compare files with MANIFEST.json where there is one, and sample four slices of every tensor."""
    if opened.checkpoint is None:
        findings.add(
            "values-unread", "a repository is inspected by its metadata", "download it to look at values"
        )
        return
    _check_hashes(opened, findings, progress)
    total = sum(min(t.nbytes, _SLICE * _SLICES) for t in opened.tensors.values())
    with progress.task("inspect: sample values", total) as task:
        for name, info in opened.tensors.items():
            try:
                for data in _slices(opened.checkpoint, info):
                    _check_slice(opened, name, info, data, findings)
                    task.advance(data.nbytes)
            except InputError as error:
                findings.add("shard-broken", error.what, _AGAIN, file=info.file.name, tensor=name)


def _slices(checkpoint: Checkpoint, info: TensorInfo) -> Iterator[NDArray[np.uint8]]:
    if info.nbytes <= _SLICE * _SLICES:
        yield np.frombuffer(checkpoint.read_bytes(info.name), np.uint8)
        return
    for i in range(_SLICES):
        start = (info.nbytes - _SLICE) * i // (_SLICES - 1) // 16 * 16  # 16: whole values of any dtype
        yield np.frombuffer(checkpoint.read_bytes(info.name, start, start + _SLICE), np.uint8)


def _check_slice(
    opened: Opened, name: str, info: TensorInfo, data: NDArray[np.uint8], findings: Findings
) -> None:
    place = {"file": info.file.name, "tensor": name}
    if not _finite(data, info.dtype):
        findings.add("values-not-finite", "holds NaN or infinity", _AGAIN, **place)
    elif name.endswith(".qzeros"):
        if not _symmetric(data, opened.widths.get(name.removesuffix(".qzeros"), 0)):
            findings.add(
                "zeros-asymmetric", "zero points are not 2^(bits-1)", "quantize symmetrically", **place
            )
    elif name.endswith((".scales", ".weight_scale_inv")):
        if not data.view(_UNSIGNED[info.dtype]).all():
            findings.add("scale-zero", "holds a zero", "look at its group in the source", **place)
    elif len(info.shape) >= 2 and data.size and not data.any():
        findings.add(
            "values-zero",
            f"{data.nbytes} bytes in a row are zero",
            f"compare it with the source, or {_AGAIN}",
            **place,
        )


_UNSIGNED: dict[str, type[np.unsignedinteger]] = {"BF16": np.uint16, "F16": np.uint16, "F32": np.uint32}
# Sign removed, a value at or above this pattern is infinite or NaN.
_INFINITY = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}


def _finite(data: NDArray[np.uint8], dtype: str) -> bool:
    if dtype == "F8_E4M3":
        return not ((data & 0x7F) == 0x7F).any()  # e4m3 has NaN and no infinity
    if dtype not in _INFINITY:
        return True
    patterns = data.view(_UNSIGNED[dtype])
    return not ((patterns & (np.iinfo(patterns.dtype).max >> 1)) >= _INFINITY[dtype]).any()


def _symmetric(data: NDArray[np.uint8], width: int) -> bool:
    """Stored zero points are 2^(width-1) - 1 in every field, packed by the rule of the codes."""
    if not width:
        return True  # reported as bits-width
    bits = np.unpackbits(data, bitorder="little")
    whole = bits[: bits.size // width * width].reshape(-1, width)
    field = [(2 ** (width - 1) - 1) >> i & 1 for i in range(width)]
    return bool((whole == np.array(field, np.uint8)).all())


def _check_hashes(opened: Opened, findings: Findings, progress: Progress) -> None:
    files = (opened.json(MANIFEST) or {}).get("files", {})
    present = {name: record for name, record in files.items() if name in opened.files and "sha256" in record}
    if not present:
        return
    with progress.task("inspect: sha256", sum(opened.files[name] for name in present)) as task:
        for name, record in present.items():
            digest = hashlib.sha256()
            with (Path(opened.where) / name).open("rb") as f:
                while data := f.read(_READ):
                    digest.update(data)
                    task.advance(len(data))
            if digest.hexdigest() != record["sha256"]:
                findings.add("hash-wrong", f"its sha256 is not the one in {MANIFEST}", _AGAIN, file=name)
