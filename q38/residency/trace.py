"""A routing trace: which experts each token chose in each layer.

File: safetensors with `ids` (U16 or I16, I32) and, where known, `weights` (F32), both [tokens, layers, top_k];
metadata `experts` gives the number of experts a layer has.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.base.files import advising, holds
from q38.checkpoint.header import TensorInfo, read_header
from q38.checkpoint.writer import stream_safetensors

SCHEMA = "q38.trace/1"
IDS, WEIGHTS = "ids", "weights"
_INTEGERS: dict[str, Any] = {"U16": np.uint16, "I16": np.int16, "I32": np.int32, "I64": np.int64}


@dataclass(frozen=True)
class Trace:
    """ids: int64 [tokens, layers, top_k]; weights: float32 of the same shape, or None; experts per layer."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32] | None
    experts: int

    @property
    def tokens(self) -> int:
        return len(self.ids)

    @property
    def layers(self) -> int:
        return int(self.ids.shape[1])

    @property
    def top_k(self) -> int:
        return int(self.ids.shape[2])

    def split(self, tokens: int) -> tuple[Trace, Trace]:
        """The first `tokens` tokens, and the rest."""
        w = self.weights
        return (
            Trace(self.ids[:tokens], None if w is None else w[:tokens], self.experts),
            Trace(self.ids[tokens:], None if w is None else w[tokens:], self.experts),
        )

    def counts(self) -> NDArray[np.float64]:
        """[layers, experts]: selections of each expert."""
        return self._sum(None)

    def mass(self) -> NDArray[np.float64]:
        """[layers, experts]: sum of gate weights; the selections where the trace has no weights."""
        return self._sum(self.weights)

    def _sum(self, weights: NDArray[np.float32] | None) -> NDArray[np.float64]:
        rows = self.ids + np.arange(self.layers)[None, :, None] * self.experts  # [T, L, K]
        flat = None if weights is None else weights.ravel()
        total = np.bincount(rows.ravel(), flat, minlength=self.layers * self.experts)
        return total.astype(np.float64).reshape(self.layers, self.experts)


def read_trace(file: Path) -> Trace:
    """Read a trace file.

    Raises:
        InputError: not a trace, or ids outside the experts.
    """
    remedy = "record a trace with q38 build-placement"
    with advising(remedy):
        header = read_header(file)
    if IDS not in header.tensors or not str(header.metadata.get("experts", "")).isdigit():
        raise InputError("has no tensor 'ids' or no 'experts' in its metadata", where=file, remedy=remedy)
    info, experts = header.tensors[IDS], int(header.metadata["experts"])
    if info.dtype not in _INTEGERS or len(info.shape) != 3 or 0 in info.shape:
        raise InputError(
            f"'ids' is {info.dtype} {list(info.shape)}, not integers [tokens, layers, top_k]",
            where=file,
            remedy=remedy,
        )
    ids = _array(info, _INTEGERS[info.dtype]).astype(np.int64)
    if ids.min() < 0 or ids.max() >= experts:
        raise InputError(
            f"ids run from {ids.min()} to {ids.max()}, there are {experts} experts", where=file, remedy=remedy
        )
    weights = None
    if WEIGHTS in header.tensors:
        info = header.tensors[WEIGHTS]
        if info.dtype != "F32" or info.shape != ids.shape:
            raise InputError(
                f"'weights' is {info.dtype} {list(info.shape)}, not F32 {list(ids.shape)}",
                where=file,
                remedy=remedy,
            )
        weights = _array(info, np.float32)
    return Trace(ids, weights, experts)


def refuse_other(file: Path) -> None:
    """Refuse to write a trace over a file that is none.

    Raises:
        InputError: as said.
    """
    holds(file, f"{SCHEMA} file", lambda f: read_header(f).metadata.get("schema") == SCHEMA)


def write_trace(file: Path, trace: Trace) -> None:
    """Write a trace file (atomically)."""
    arrays: list[tuple[str, str, NDArray[Any]]] = [(IDS, "U16", trace.ids.astype(np.uint16))]
    if trace.weights is not None:
        arrays.append((WEIGHTS, "F32", np.ascontiguousarray(trace.weights, np.float32)))
    stream_safetensors(
        file,
        [(name, dtype, array.shape, array.nbytes) for name, dtype, array in arrays],
        (array.tobytes() for _, _, array in arrays),
        {"schema": SCHEMA, "experts": str(trace.experts)},
    )


def _array(info: TensorInfo, dtype: Any) -> NDArray[Any]:
    data = np.fromfile(info.file, dtype, count=info.numel, offset=info.begin)
    return data.reshape(info.shape)
