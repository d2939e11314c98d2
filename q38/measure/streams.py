"""Residual streams of a model over many sequences: in memory, or in one file per block.

The stream is hc_count times as wide as the hidden size, so a few hundred thousand tokens do not fit beside a block.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.writer import fsync_directory, writing


class Stream:
    """What enters a block, for all sequences: [sequences, tokens, width].

    Without a directory it lies in memory and is replaced as it is written. With one, every block writes a new
    file, `NAME-STEP.bin`, and `drop_old` removes those before it once the caller has recorded the step.

    Args:
        shape: (sequences, tokens, width).
        step: the step whose file is there already; 0: nothing was written yet.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        *,
        directory: Path | None = None,
        step: int = 0,
    ) -> None:
        self.name, self.shape, self.dtype, self.step = name, shape, dtype, step
        self._directory = directory
        self._memory = torch.empty(shape, dtype=dtype) if directory is None else None
        self._row = shape[1] * shape[2] * dtype.itemsize

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Sequences [start, stop)."""
        if self._memory is not None:
            return self._memory[start:stop]
        out = torch.empty(stop - start, *self.shape[1:], dtype=self.dtype)
        view = _bytes(out)
        with self._file(self.step).open("rb", buffering=0) as f:
            f.seek(start * self._row)
            while len(view):
                n = f.readinto(view)
                if not n:
                    raise OSError(f"{self._file(self.step)} ended early")
                view = view[n:]
        return out

    def write(self, start: int, values: torch.Tensor) -> None:
        """Set sequences from `start` on, of the step after this one."""
        if self._memory is not None:
            self._memory[start : start + len(values)] = values
            return
        path = self._file(self.step + 1)
        data = _bytes(values.contiguous())
        with writing(path), path.open("r+b" if path.exists() else "wb", buffering=0) as f:
            f.seek(start * self._row)
            while len(data):
                data = data[f.write(data) :]

    def advance(self) -> None:
        """The step that was written is complete: it is what is read from here on. Durable on return."""
        self.step += 1
        if self._directory is not None:
            with self._file(self.step).open("rb") as f:
                os.fsync(f.fileno())
            fsync_directory(self._directory)

    def drop_old(self) -> None:
        """Remove the files of all steps but this one."""
        if self._directory is not None:
            for path in self._directory.glob(f"{self.name}-*.bin"):
                if path != self._file(self.step):
                    path.unlink()

    def _file(self, step: int) -> Path:
        assert self._directory is not None
        return self._directory / f"{self.name}-{step}.bin"


def _bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    array: Any = tensor.view(torch.uint8).numpy()
    return memoryview(array).cast("B")
