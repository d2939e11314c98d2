"""Rows of the n-gram table by id, read from disk as they are needed."""

from __future__ import annotations

import os
import weakref
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import Checkpoint, to_torch_dtype
from q38.ple.cast import dequantize
from q38.ple.find import PLE_JSON
from q38.ple.scales import as_float32
from q38.ple.source import find_table
from q38.ple.table import read_info

_PAGE = 4096


@dataclass(frozen=True)
class _Segment:
    """Consecutive rows that lie together in one file."""

    file: Path
    offset: int  # of its first row, in bytes
    rows: int


@dataclass(frozen=True)
class _RowScales:
    """One scale per row, together in one file."""

    file: Path
    offset: int  # of the first, in bytes
    dtype: str


class PleTable:
    """A table on disk, of which only the rows asked for enter memory.

    Attributes:
        num_rows: rows of the table.
        dim: values per row.
        dtype: stored dtype, "F8_E4M3" or "BF16".
        scale: factor of fp8 codes; None for bf16, and for a table with one scale per row.
        origin: the file or directory it was opened from.
    """

    def __init__(
        self,
        segments: list[_Segment],
        dim: int,
        dtype: str,
        scale: float | None,
        origin: Path,
        row_scales: _RowScales | None = None,
    ) -> None:
        self._files: dict[Path, int] = {}
        self.dim, self.dtype, self.scale, self.origin = dim, dtype, scale, origin
        self._row_scales = row_scales
        self._row_bytes = dim * ITEM_BITS[dtype] // 8
        self._segments = segments
        self._ends = list(accumulate(s.rows for s in segments))
        self.num_rows = self._ends[-1]
        weakref.finalize(self, _close, self._files)

    @classmethod
    def open(cls, directory: Path) -> PleTable:
        """Open a split table (a directory with ple.json).

        Raises:
            InputError: see `read_info`.
        """
        directory = Path(directory)
        info = read_info(directory)
        segment = _Segment(directory / info.file, 0, info.rows)
        scales = _RowScales(directory / info.row_scales["file"], 0, "F32") if info.row_scales else None
        return cls([segment], info.dim, info.dtype, info.weight_scale, directory / PLE_JSON, scales)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> PleTable:
        """Read rows straight from the shards of a checkpoint whose table was not split off."""
        source = find_table(checkpoint)
        segments = [_Segment(s.file, s.begin, s.shape[0]) for s in source.shards]
        tensor = source.row_scales
        scales = _RowScales(tensor.file, tensor.begin, tensor.dtype) if tensor else None
        return cls(segments, source.dim, source.dtype, source.scale, checkpoint.path, scales)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows.

        Args:
            ids: int64 [n] on any device, repeats allowed; each is read once.

        Returns:
            bfloat16 [n, dim] on the CPU: the stored value, or code * scale rounded once.

        Raises:
            ValueError: an id is outside the table.
        """
        unique, inverse = torch.unique(ids.reshape(-1).cpu(), return_inverse=True)
        if unique.numel() == 0:
            return torch.empty(0, self.dim, dtype=torch.bfloat16)
        if unique[0] < 0 or unique[-1] >= self.num_rows:
            raise ValueError(f"row {int(unique[-1])} of a table of {self.num_rows} rows")
        wanted = unique.numpy()
        values = self.values(self.stored(wanted), wanted.tolist())  # [unique, dim]
        return values[inverse]

    @property
    def row_bytes(self) -> int:
        """Stored bytes of a row."""
        return self._row_bytes

    @property
    def scaled_by_row(self) -> bool:
        """Whether each row has a scale of its own."""
        return self._row_scales is not None

    @property
    def file(self) -> Path | None:
        """The one file that holds all rows from its first byte on; None where they are spread over several."""
        segment = self._segments[0]
        return segment.file if len(self._segments) == 1 and segment.offset == 0 else None

    def stored(self, ids: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Rows as they are stored, through the page cache: uint8 [n, row_bytes].

        Args:
            ids: ascending, without repeats, inside the table.
        """
        wanted = ids.tolist()
        data = self._read([self._place(i) for i in wanted], self._row_bytes, wanted)
        return np.frombuffer(data, np.uint8).reshape(-1, self._row_bytes)

    def values(self, stored: NDArray[np.uint8], ids: list[int]) -> torch.Tensor:
        """bfloat16 [n, dim] of rows as they are stored: the stored value, or code * scale rounded once."""
        codes = torch.from_numpy(stored).view(to_torch_dtype(self.dtype))
        scale = self.scale if self._row_scales is None else self._read_scales(self._row_scales, ids)
        return codes if scale is None else dequantize(codes, scale)

    def close(self) -> None:
        """Close the files; a later lookup opens them again."""
        _close(self._files)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies (deepcopy, another process) open the files themselves."""
        parts = (self._segments, self.dim, self.dtype, self.scale, self.origin, self._row_scales)
        return PleTable, parts

    def __enter__(self) -> PleTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read_scales(self, scales: _RowScales, ids: list[int]) -> torch.Tensor:
        """float32 [n, 1]."""
        width, fd = ITEM_BITS[scales.dtype] // 8, self._descriptor(scales.file)
        data = self._read([(fd, scales.offset + i * width) for i in ids], width, ids)
        return torch.from_numpy(as_float32(np.frombuffer(data, np.uint8), scales.dtype)).view(-1, 1)

    def _read(self, places: list[tuple[int, int]], width: int, ids: list[int]) -> bytearray:
        """`width` stored bytes at each place, in the order of `ids` (ascending, no repeats)."""
        if len(places) > 1:
            self._read_ahead(places, width)
        buffer = bytearray(len(ids) * width)
        view = memoryview(buffer)
        for n, (fd, offset) in enumerate(places):
            if os.preadv(fd, [view[n * width : (n + 1) * width]], offset) != width:
                raise InputError(
                    f"the file ended at row {ids[n]}", where=self.origin, remedy="make the table again"
                )
        return buffer

    def _place(self, row: int) -> tuple[int, int]:
        n = bisect_right(self._ends, row)
        segment = self._segments[n]
        first = self._ends[n] - segment.rows
        return self._descriptor(segment.file), segment.offset + (row - first) * self._row_bytes

    def _read_ahead(self, places: list[tuple[int, int]], width: int) -> None:
        """Let the kernel queue all pages at once: the disk sees depth, not one read after the other."""
        last = (-1, -1)
        for fd, offset in places:
            page = (fd, offset // _PAGE)
            if page != last:
                os.posix_fadvise(fd, offset, width, os.POSIX_FADV_WILLNEED)
                last = page

    def _descriptor(self, file: Path) -> int:
        fd = self._files.get(file)
        if fd is None:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            # Without this each 160-byte read would pull in 128 KiB of neighbours.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            self._files[file] = fd
        return fd


def _close(files: dict[Path, int]) -> None:
    for fd in files.values():
        os.close(fd)
    files.clear()
