"""A checkpoint directory: config, index and headers, read without touching tensor data."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError
from q38.base.files import require_directory
from q38.base.garbage import collection_paused
from q38.checkpoint.header import Header, TensorInfo, read_header
from q38.checkpoint.paths import reading
from q38.model.names import Group, classify

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FULL_HASH_LIMIT = 64 * 2**20
_SAMPLE = 2**16


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. `tensors` maps each name to its place; nothing is loaded."""

    path: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    tensors: dict[str, TensorInfo] = field(repr=False)

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Open a directory with config.json and safetensors files.

        Raises:
            InputError: a file is missing or broken, or index and headers disagree.
        """
        root = Path(path)
        require_directory(root, remedy="give a directory that holds config.json and safetensors files")
        with collection_paused():
            return cls._open(root)

    @classmethod
    def _open(cls, root: Path) -> Checkpoint:
        config = read_json(root / "config.json")
        weight_map = _weight_map(root)
        names = _shard_names(root, weight_map)
        headers = {name: read_header(root / name) for name in names}
        tensors: dict[str, TensorInfo] = {}
        for name, header in headers.items():
            for info in header.tensors.values():
                if info.name in tensors:
                    raise InputError(
                        f"tensor {info.name} is also in {tensors[info.name].file.name}",
                        where=root / name,
                        remedy="remove one of the two files, or download the checkpoint again",
                    )
                tensors[info.name] = info
        if weight_map is not None:
            _check_index(root, weight_map, tensors)
        return cls(root, config, headers, tensors)

    @property
    def nbytes(self) -> int:
        """Tensor bytes, headers not counted."""
        return sum(t.nbytes for t in self.tensors.values())

    def info(self, name: str) -> TensorInfo:
        """The entry of one tensor, or an InputError that names the checkpoint."""
        if name not in self.tensors:
            raise InputError(
                f"tensor {name} is missing", where=self.path, remedy="run q38 inspect on this directory"
            )
        return self.tensors[name]

    def read_bytes(self, name: str, start: int = 0, stop: int | None = None) -> bytearray:
        """Bytes [start, stop) of one tensor, read with pread (no mmap, so memory stays bounded).

        Raises:
            InputError: no such tensor, or its file is gone, ends early or cannot be read.
        """
        info = self.info(name)
        stop = info.nbytes if stop is None else stop
        buffer = bytearray(stop - start)
        view, position = memoryview(buffer), info.begin + start
        with reading(info.file), info.file.open("rb", buffering=0) as f:
            while len(view):
                n = os.preadv(f.fileno(), [view], position)
                if n == 0:
                    raise InputError(
                        f"the file ended inside tensor {name}",
                        where=info.file,
                        remedy="download the file again",
                    )
                view, position = view[n:], position + n
        return buffer

    def read(self, name: str) -> torch.Tensor:
        """One whole tensor in its stored dtype."""
        info = self.info(name)
        return _as_tensor(self.read_bytes(name), info.dtype, info.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows [start, stop) of the first dimension."""
        info = self.info(name)
        row = info.nbytes // info.shape[0]
        return _as_tensor(
            self.read_bytes(name, start * row, stop * row), info.dtype, (stop - start, *info.shape[1:])
        )

    def match(self, predicate: Any) -> Iterator[TensorInfo]:
        """Entries whose name satisfies `predicate`, in file order."""
        return (t for t in self.tensors.values() if predicate(t.name))

    @cached_property
    def group_bytes(self) -> Counter[Group]:
        """Bytes of each parameter group."""
        found: Counter[Group] = Counter()
        for info in self.tensors.values():
            found[classify(info.name)] += info.nbytes
        return found

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """File name -> hash, for telling whether a source changed between two runs.

        sha256 of the whole file up to 64 MiB; beyond that of its size, its header and 64 samples
        of 64 KiB. config.json is hashed whole.
        """
        files = {name: fingerprint_file(self.path / name, header=h.raw) for name, h in self.headers.items()}
        return {"config.json": fingerprint_file(self.path / "config.json"), **files}


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file, or an InputError."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            "no such file", where=file, remedy="download it again, or correct the path"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"not valid JSON ({error})", where=file, remedy="download it again") from None
    except OSError as error:
        raise InputError(
            f"cannot be read ({error.strerror})", where=file, remedy="check its permissions"
        ) from None
    if not isinstance(value, dict):
        raise InputError("not a JSON object", where=file, remedy="download it again")
    return value


def fingerprint_file(file: Path, *, header: bytes = b"") -> str:
    """sha256 of a file, or of size, header and samples when it is over 64 MiB."""
    digest = hashlib.sha256()
    with reading(file), file.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        if size <= _FULL_HASH_LIMIT:
            while chunk := f.read(2**20):
                digest.update(chunk)
            return digest.hexdigest()
        digest.update(f"{size}:".encode() + header)
        for i in range(64):
            f.seek((size - _SAMPLE) * i // 63)
            digest.update(f.read(_SAMPLE))
    return "sampled-" + digest.hexdigest()


def to_torch_dtype(name: str) -> torch.dtype:
    """Safetensors dtype name -> torch dtype."""
    import torch

    names = {
        "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
        "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
        "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    }  # fmt: skip
    return names[name]


def _as_tensor(buffer: bytearray, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    import torch

    if not buffer:
        return torch.empty(shape, dtype=to_torch_dtype(dtype))
    return torch.frombuffer(buffer, dtype=to_torch_dtype(dtype)).view(shape)


def _weight_map(root: Path) -> dict[str, str] | None:
    """Tensor -> file, as the index says; None without an index."""
    if not (root / INDEX).exists():
        return None
    weight_map = read_json(root / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise InputError(
            "has no weight_map from names to files", where=root / INDEX, remedy="download it again"
        )
    return weight_map


def _shard_names(root: Path, weight_map: dict[str, str] | None) -> list[str]:
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
        if not names:
            raise InputError("lists no tensors", where=root / INDEX, remedy="download it again")
        for name in names:
            if Path(name).name != name:
                raise InputError(
                    f"names the file '{name}' outside the directory",
                    where=root / INDEX,
                    remedy="download it again",
                )
            if not (root / name).exists():
                raise InputError(
                    f"names {name}, which is absent", where=root / INDEX, remedy=f"download {name}"
                )
        return names
    if (root / SINGLE).exists():
        return [SINGLE]
    stray = sorted(root.glob("*.safetensors"))
    if stray:
        raise InputError(
            f"{len(stray)} safetensors files but no {INDEX}", where=root, remedy=f"download {INDEX}"
        )
    raise InputError("holds no safetensors files", where=root, remedy="give the directory of a checkpoint")


def _check_index(root: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    for name, file in weight_map.items():
        if name not in tensors:
            raise InputError(
                f"places tensor {name} in {file}, which does not hold it",
                where=root / INDEX,
                remedy=f"download {file} again",
            )
        if tensors[name].file.name != file:
            raise InputError(
                f"places tensor {name} in {file}, it is in {tensors[name].file.name}",
                where=root / INDEX,
                remedy="download the index again",
            )
    extra = next((n for n in tensors if n not in weight_map), None)
    if extra is not None:
        raise InputError(
            f"does not list tensor {extra}, which {tensors[extra].file.name} holds",
            where=root / INDEX,
            remedy="download the index again",
        )
