"""Atomic writes: temporary name, sha256 while writing, fsync, rename."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError, ResourceError
from q38.base.units import format_bytes
from q38.checkpoint.paths import read_chunks

if TYPE_CHECKING:
    import torch

_UNWRITABLE = frozenset(
    {errno.EACCES, errno.EROFS, errno.EPERM, errno.ENOTDIR, errno.ENOENT, errno.EISDIR, errno.EEXIST}
)
TEMPORARY = ".q38-tmp"  # suffix of every file that is not finished


@dataclass(frozen=True)
class FileRecord:
    """What a finished file holds; goes into the manifest."""

    bytes: int
    sha256: str
    tensors: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if v is not None}


class HashingFile:
    """A binary file that hashes what is written to it. `path` is the name that refusals give."""

    def __init__(self, raw: Any, path: Path) -> None:
        self._raw, self._path = raw, path
        self._digest = hashlib.sha256()
        self.bytes = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        with writing(self._path):
            self._raw.write(data)
        self._digest.update(data)
        self.bytes += len(data)

    def record(self, tensors: int | None = None) -> FileRecord:
        return FileRecord(self.bytes, self._digest.hexdigest(), tensors)


@contextmanager
def atomic_file(path: Path) -> Iterator[HashingFile]:
    """Open `path` for writing under a temporary name; on success fsync and rename, else remove it.

    What the caller does meanwhile, reading inputs among it, keeps its own errors.

    Raises:
        ResourceError: the disk is full.
        InputError: the directory cannot be written.
    """
    temporary = path.with_name(path.name + TEMPORARY)
    try:
        with writing(path):
            raw = temporary.open("wb")
        try:
            yield HashingFile(raw, path)
            with writing(path):
                raw.flush()
                os.fsync(raw.fileno())
        finally:
            with writing(path):  # writes what is still buffered
                raw.close()
        with writing(path):
            temporary.replace(path)
            fsync_directory(path.parent)
    finally:
        with suppress(OSError):  # gone after the rename, or never made
            temporary.unlink()


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals to write `path` into ours."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ResourceError(
                "the disk is full", where=path, remedy="free space and run the same command again; it resumes"
            ) from None
        if error.errno == errno.EFBIG:
            raise ResourceError(
                "the file would pass the size limit (ulimit -f, or of the file system)",
                where=path,
                remedy="raise the limit and run the same command again; it resumes",
            ) from None
        if error.errno in _UNWRITABLE:
            raise InputError(
                f"cannot be written ({error.strerror})", where=path, remedy="choose a writable directory"
            ) from None
        raise


def write_json(path: Path, value: Any) -> FileRecord:
    """Write JSON atomically, indented, keys in the given order."""
    with atomic_file(path) as f:
        f.write(json.dumps(value, indent=1, ensure_ascii=False).encode() + b"\n")
    return f.record()


def copy_file(source: Path, target: Path, *, sha256: str | None = None) -> FileRecord:
    """Copy one file atomically, hashing on the way.

    Args:
        sha256: what the source must have, in hexadecimal.

    Raises:
        InputError: the source cannot be read, or has another hash: the target is left as it was.
    """
    with atomic_file(target) as out:
        for chunk in read_chunks(source):
            out.write(chunk)
        require_hash(source, out.record().sha256, sha256)
    return out.record()


def require_hash(file: Path, found: str, recorded: str | None) -> None:
    """Refuse an input whose bytes are not those that its manifest records; None records nothing.

    Raises:
        InputError: with both hashes.
    """
    if recorded not in (None, found):
        raise InputError(
            f"is damaged: sha256 is {found[:12]}..., its MANIFEST.json says {str(recorded)[:12]}...",
            where=file,
            remedy="restore it, or make it again",
        )


def write_safetensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> FileRecord:
    """Write one shard atomically. Same tensors, same bytes: names are stored in the given order."""
    entries = (
        (name, dtype_name(t.dtype), tuple(t.shape), t.numel() * t.element_size())
        for name, t in tensors.items()
    )
    return stream_safetensors(path, list(entries), (tensor_bytes(t) for t in tensors.values()), metadata)


def stream_safetensors(
    path: Path,
    entries: list[tuple[str, str, tuple[int, ...], int]],
    data: Iterable[bytes | bytearray | memoryview],
    metadata: Mapping[str, str] | None = None,
) -> FileRecord:
    """Write one shard from a stream, so that no tensor needs to be whole in memory.

    Args:
        entries: (name, safetensors dtype, shape, bytes) in data order.
        data: the bytes of all tensors, one after the other, in any chunking.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    position = 0
    for name, dtype, shape, nbytes in entries:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + nbytes]}
        position += nbytes
    raw = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)  # data starts 8-aligned, as the format asks
    with atomic_file(path) as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        start = f.bytes
        for chunk in data:
            f.write(chunk)
        if f.bytes - start != position:
            raise ValueError(f"{path}: {f.bytes - start} bytes of data for {position} in the header")
    return f.record(tensors=len(entries))


def dtype_name(dtype: torch.dtype) -> str:
    """torch dtype -> safetensors dtype name."""
    import torch

    names = {
        torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32", torch.int64: "I64",
        torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
        torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    }  # fmt: skip
    return names[dtype]


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The raw bytes of a CPU tensor, without a copy where it is contiguous."""
    import torch

    flat: Any = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def require_free_space(directory: Path, needed: int) -> None:
    """Refuse before the first byte when `needed` bytes do not fit under `directory`."""
    existing = directory
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ResourceError(
            f"{format_bytes(needed)} needed, {format_bytes(free)} free: {format_bytes(needed - free)} short",
            where=directory,
            remedy="free space or choose another disk",
        )


def fsync_directory(directory: Path) -> None:
    """Make a rename durable."""
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
