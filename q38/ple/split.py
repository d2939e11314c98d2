"""The n-gram table out of the checkpoint into one flat file: rows by id, without a header.

Resumable per shard. The table grows in OUT/.q38 and is renamed when whole. Each journal line holds
the sha256 of everything up to the end of its shard, so a resumed run re-hashes the finished part and
goes on from the last shard that is still right.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint, read_json
from q38.checkpoint.job import Job
from q38.checkpoint.writer import FileRecord, fsync_directory, require_free_space, write_json, writing
from q38.ple import scales
from q38.ple.append import Appender
from q38.ple.cast import (
    Cast,
    CastError,
    count_patterns,
    first_not_finite,
    is_finite,
    largest_pattern,
    scale_for,
)
from q38.ple.find import PLE_JSON
from q38.ple.source import BF16, FP8, TableSource, find_table
from q38.ple.stream import CHUNK, Piece, read_tensors
from q38.ple.table import PleInfo
from q38.ple.verify import compare_table

StoredDtype = Literal["f8_e4m3", "source"]
_REHASH = 2**22


def split_ple(
    source: Path,
    out: Path,
    *,
    dtype: StoredDtype = "f8_e4m3",
    fresh: bool = False,
    progress: Progress = SILENT,
    chunk: int = CHUNK,
) -> dict[str, Any]:
    """Write OUT/ple.f8_e4m3.bin and OUT/ple.json from the checkpoint at `source`.

    A bf16 table is quantized with one scale (amax / 448, rounded up to bf16); an fp8 table is carried over
    byte for byte with its scale, or with its scale per row in ple.scales.f32.bin. `dtype="source"` keeps bf16 as it is (ple.bf16.bin). 64 rows of each
    shard are compared with the source before the file gets its name.

    Args:
        chunk: bytes per read; memory stays below about 20 chunks.

    Returns:
        The contents of ple.json.

    Raises:
        InputError: the table is incomplete, of mixed dtypes, of the wrong size, fp8 without a scale, or
            holds NaN or infinity; `out` holds something else.
        ResourceError: not enough free space.
    """
    table = find_table(Checkpoint.open(source))
    identity = {
        "files": table.fingerprint,
        "table": {"rows": table.rows, "dim": table.dim, "dtype": table.dtype, "scale": table.scale},
        "dtype": dtype,
    }
    if table.row_scales is not None:
        identity["row_scales"] = table.row_scales.name
    # SRC/ple is where the other verbs look first.
    with Job(
        out, "split-ple", identity, inputs=(source,), below_input=True, fresh=fresh, progress=progress
    ) as job:
        if not job.up_to_date:
            _Split(table, job, _stored(table, dtype), chunk, progress).run()
        return read_json(out / PLE_JSON)


def plan_split(source: Path, *, dtype: StoredDtype = "f8_e4m3") -> dict[str, Any]:
    """What `split_ple` would read and write, in bytes; nothing is written."""
    table = find_table(Checkpoint.open(source))
    stored = _stored(table, dtype)
    passes = 2 if (table.dtype, stored) == (BF16, FP8) else 1  # the first finds the largest value
    return {
        "reads": passes * table.nbytes,
        "writes": _stored_bytes(table, stored) + _scale_bytes(table),
        "file": _file_name(stored),
        "rows": table.rows,
        "dim": table.dim,
        "shards": len(table.shards),
        "source_dtype": table.dtype,
        "dtype": stored,
    }


def _stored(table: TableSource, dtype: StoredDtype) -> str:
    return FP8 if dtype == "f8_e4m3" else table.dtype


def _stored_bytes(table: TableSource, stored: str) -> int:
    return table.rows * table.dim * (1 if stored == FP8 else 2)


def _scale_bytes(table: TableSource) -> int:
    return table.rows * scales.ITEM if table.row_scales else 0


def _file_name(stored: str) -> str:
    return f"ple.{stored.lower()}.bin"


class _Split:
    """One run. The journal's units: range-N (largest pattern), shard-N (written), table, scales, ple.json."""

    def __init__(self, table: TableSource, job: Job, stored: str, chunk: int, progress: Progress) -> None:
        self.table, self.job, self.stored, self.chunk, self.progress = table, job, stored, chunk, progress
        self.final = job.out / _file_name(stored)
        self.partial = job.state / (self.final.name + ".partial")
        self.cast: Cast | None = None
        self.scale = table.scale

    def run(self) -> None:
        if "table" not in self.job.done:
            if not self.partial.exists() and self.final.exists():
                self.final.rename(self.partial)  # killed between the rename and its journal line
            have = self.partial.stat().st_size if self.partial.exists() else 0
            needed = _stored_bytes(self.table, self.stored) + _scale_bytes(self.table)
            require_free_space(self.job.out, max(0, needed - have))
        if (self.table.dtype, self.stored) == (BF16, FP8):
            self.scale = scale_for(self._largest())
            self.cast = Cast(self.scale)
        if "table" not in self.job.done:
            self._write_table()
        if self.table.row_scales is not None and "scales" not in self.job.done:
            self._write_scales(self.table.row_scales)
        info = self._info()
        record = write_json(self.job.out / PLE_JSON, info.to_dict())
        self.job.commit("ple.json", files={PLE_JSON: record})
        self.job.finish({"weight_scale": info.weight_scale, "quantization": info.quantization})

    def _largest(self) -> int:
        """First pass: the largest magnitude of the table, journaled per shard."""
        left = {n: s for n, s in enumerate(self.table.shards) if f"range-{n}" not in self.job.done}
        with self.progress.task("split-ple: range of values", sum(s.nbytes for s in left.values())) as task:
            peak = 0
            for piece in read_tensors(left, _pattern_of, self.chunk):
                peak = max(peak, piece.value)
                task.advance(piece.nbytes)
                if piece.last:
                    if not is_finite(peak):
                        raise _not_finite(piece.tensor)
                    self.job.commit(f"range-{piece.number}", result=peak)
                    peak = 0
        return max(int(self.job.done[f"range-{n}"]["result"]) for n in range(len(self.table.shards)))

    def _write_table(self) -> None:
        with (
            writing(self.partial),
            self.partial.open("r+b" if self.partial.exists() else "w+b", buffering=0) as file,
        ):
            first, digest = self._resume_point(file.fileno())
            with Appender(file.fileno(), digest) as appender:
                self._append(appender, first)
        compare_table(self.partial, self.table, self.stored, self.scale)
        record = FileRecord(self.partial.stat().st_size, digest.hexdigest())
        with writing(self.final):
            self.partial.replace(self.final)
            fsync_directory(self.job.out)
            fsync_directory(self.job.state)
        self.job.commit("table", files={self.final.name: record})

    def _write_scales(self, tensor: TensorInfo) -> None:
        file = self.job.out / scales.FILE
        record = scales.write_scales(file, tensor, self.progress)
        scales.compare_scales(file, tensor, full=False)
        self.job.commit("scales", files={scales.FILE: record})

    def _resume_point(self, fd: int) -> tuple[int, Any]:
        """How many shards are on disk and right, with the hash so far."""
        digest = hashlib.sha256()
        finished, end = 0, 0
        sizes = [s.shape[0] * self.table.dim * (1 if self.stored == FP8 else 2) for s in self.table.shards]
        on_disk = os.fstat(fd).st_size
        done = [n for n in range(len(sizes)) if f"shard-{n}" in self.job.done]
        if done:
            with self.progress.task(
                "split-ple: re-hash the finished part", sum(sizes[n] for n in done)
            ) as task:
                for n, size in enumerate(sizes):
                    if f"shard-{n}" not in self.job.done or end + size > on_disk:
                        break
                    ahead = digest.copy()
                    for start in range(end, end + size, _REHASH):
                        data = os.pread(fd, min(_REHASH, end + size - start), start)
                        ahead.update(data)
                        task.advance(len(data))
                    if ahead.hexdigest() != self.job.done[f"shard-{n}"]["result"]["sha256"]:
                        break
                    digest, finished, end = ahead, n + 1, end + size
        os.lseek(fd, end, os.SEEK_SET)  # what follows is written over
        return finished, digest

    def _append(self, appender: Appender, first: int) -> None:
        left = dict(list(enumerate(self.table.shards))[first:])
        error = CastError()
        with self.progress.task("split-ple: write", sum(s.nbytes for s in left.values())) as task:
            for piece in read_tensors(left, self._convert, self.chunk):
                data, part, finite = piece.value
                if not finite:
                    raise _not_finite(piece.tensor)
                appender.write(data)
                error.add(part)
                task.advance(piece.nbytes)
                if piece.last:
                    appender.then(self._committing(piece, error))
                    error = CastError()

    def _convert(self, data: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], CastError, bool]:
        """Stored bytes, the error of the cast, and whether all values are finite."""
        if self.cast is None:
            return data, CastError(), first_not_finite(data, self.stored) is None
        values = data.view(np.uint16)
        return self.cast(values), self.cast.error(count_patterns(values)), True  # the first pass looked

    def _committing(self, piece: Piece[Any], error: CastError) -> Callable[[str], None]:
        def commit(sha256: str) -> None:
            self.job.commit(f"shard-{piece.number}", result={"sha256": sha256, "error": asdict(error)})

        return commit

    def _info(self) -> PleInfo:
        record = self.job.files[self.final.name]
        return PleInfo(
            file=self.final.name,
            rows=self.table.rows,
            dim=self.table.dim,
            dtype=self.stored,
            weight_scale=self.scale,
            bytes=record["bytes"],
            sha256=record["sha256"],
            layer=self.table.layer,
            n_shards=len(self.table.shards),
            rows_per_shard=self.table.rows_per_shard,
            source={"dtype": self.table.dtype, "files": self.table.fingerprint},
            quantization=self._quantization() if self.cast else None,
            row_scales={"file": scales.FILE, **self.job.files[scales.FILE]}
            if self.table.row_scales
            else None,
        )

    def _quantization(self) -> dict[str, Any]:
        total = CastError()
        for n in range(len(self.table.shards)):
            total.add(CastError(**self.job.done[f"shard-{n}"]["result"]["error"]))
        return {"method": "one scale, amax / 448 rounded up to bf16, saturating", **total.summary()}


def _not_finite(tensor: TensorInfo) -> InputError:
    return InputError(
        f"tensor {tensor.name} holds NaN or infinity", where=tensor.file, remedy="download the file again"
    )


def _pattern_of(data: NDArray[np.uint8]) -> int:
    return largest_pattern(data.view(np.uint16))
