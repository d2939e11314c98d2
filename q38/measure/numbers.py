"""The numbers in a checkpoint: finite values, code histograms, and the error against the source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from q38.base.progress import SILENT, Progress
from q38.base.settings import cpu_count
from q38.base.threads import one_torch_thread
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.source import SourceWeights
from q38.measure.checks import Check, Fault, Part
from q38.measure.matrices import MAX_RELATIVE_ERROR, PIECE, Matrix, Measured, find_matrices, measure_matrix
from q38.model.names import classify, module_of

MAX_THREADS = 8  # each holds a few pieces of about 100 MB
_FLOATS = ("F16", "BF16", "F32", "F64")
_FULL_HISTOGRAM = 4  # at these widths every tensor must use every level; wider ones are counted by group


@dataclass
class Sum:
    """Error and codes summed over some packed matrices of one width."""

    name: str
    bits: int
    matrices: int = 0
    weights: int = 0
    squared_error: float = 0.0
    squared_weight: float = 0.0
    worst: tuple[float, str] | None = None
    histogram: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    smallest_scale: float = math.inf
    largest_scale: float = 0.0

    def add(self, m: Matrix, found: Measured) -> None:
        self.matrices += 1
        self.weights += m.n * m.k
        self.squared_error += found.squared_error
        self.squared_weight += found.squared_weight
        self.histogram = found.histogram + self.histogram if self.histogram.numel() else found.histogram
        self.smallest_scale = min(self.smallest_scale, found.smallest)
        self.largest_scale = max(self.largest_scale, found.largest)
        error = relative_error(found)
        if error is not None and (self.worst is None or not error <= self.worst[0]):
            self.worst = error, m.module

    def to_dict(self) -> dict[str, Any]:
        error = math.sqrt(self.squared_error / self.squared_weight) if self.squared_weight else None
        return {
            "name": self.name,
            "bits": self.bits,
            "matrices": self.matrices,
            "weights": self.weights,
            "relative_error": error if error is None or math.isfinite(error) else None,
            "worst_relative_error": self.worst[0] if self.worst and math.isfinite(self.worst[0]) else None,
            "worst_matrix": self.worst[1] if self.worst else None,
            "limit": MAX_RELATIVE_ERROR[self.bits],
            "levels_used": int((self.histogram > 0).sum()),
            "histogram": self.histogram.tolist(),
            "smallest_scale": self.smallest_scale if math.isfinite(self.smallest_scale) else None,
            "largest_scale": self.largest_scale,
        }


@dataclass
class _Faults:
    """What is wrong, by check."""

    scales: list[Fault] = field(default_factory=list)
    levels: list[Fault] = field(default_factory=list)
    errors: list[Fault] = field(default_factory=list)
    values: list[Fault] = field(default_factory=list)
    copies: list[Fault] = field(default_factory=list)


def relative_error(found: Measured) -> float | None:
    """||w - w_source|| / ||w_source||; None where there is no source or a scale is not finite."""
    if not found.in_source or found.bad_scales:
        return None
    return (
        math.sqrt(found.squared_error / found.squared_weight)
        if found.squared_weight
        else math.sqrt(found.squared_error)
    )


def check_numbers(
    model: Checkpoint, source: Checkpoint | None = None, *, progress: Progress = SILENT
) -> Part:
    """Check every tensor's values, and against `source` where it is given.

    Returns:
        The checks; "groups" sums the packed matrices by parameter group, "matrices" names each one,
        the experts of a layer together ("...experts.*.up_proj").
    """
    matrices = list(find_matrices(model))
    packed = {name for m in matrices for name in m.tensors}
    plain = [t for t in model.tensors.values() if t.name not in packed and t.dtype in _FLOATS]
    weights = SourceWeights(source) if source else None
    groups: dict[tuple[str, int], Sum] = {}
    rows: dict[tuple[str, int], Sum] = {}
    faults = _Faults()
    total = sum(model.tensors[name].nbytes for name in packed) + sum(t.nbytes for t in plain)
    with progress.task("numbers", total) as task, one_torch_thread(), _pool() as pool:
        # In the order of the file, whichever thread is done first: the same sums on every run.
        for m, found in zip(
            matrices, pool.map(lambda m: measure_matrix(model, weights, m), matrices), strict=True
        ):
            for sums, name in (
                (groups, str(classify(m.module))),
                (rows, re.sub(r"\.experts\.\d+\.", ".experts.*.", m.module)),
            ):
                sums.setdefault((name, m.bits), Sum(name, m.bits)).add(m, found)
            _judge(model, m, found, faults)
            task.advance(sum(model.tensors[name].nbytes for name in m.tensors))
        for info in plain:
            _compare_plain(model, weights, info, faults)
            task.advance(info.nbytes)
    faults.levels += _unused_levels(groups)
    checks = [
        Check.of_faults("finite scales", faults.scales, checked=len(matrices), unit="matrices"),
        Check.of_faults("all levels used", faults.levels, checked=len(matrices), unit="matrices"),
        Check.of_faults("finite values", faults.values, checked=len(plain)),
    ]
    if weights is None:
        checks += [
            Check.skipped(name, "needs --source") for name in ("error against the source", "copied tensors")
        ]
    else:
        checks.append(
            Check.of_faults("error against the source", faults.errors, checked=len(matrices), unit="matrices")
        )
        checks.append(Check.of_faults("copied tensors", faults.copies, checked=len(plain)))
    by_size = sorted(groups.values(), key=lambda g: (g.bits, -g.weights))
    return Part(
        "numbers",
        checks,
        {"groups": [g.to_dict() for g in by_size], "matrices": [_short(r) for r in rows.values()]},
    )


def _judge(model: Checkpoint, m: Matrix, found: Measured, faults: _Faults) -> None:
    """Note what is wrong with one packed matrix."""
    if found.bad_scales:
        info = model.info(f"{m.module}.scales")
        what = f"{found.bad_scales} of {info.numel} scales are not finite"
        faults.scales.append(Fault(info.file.name, info.name, what))
    if m.bits <= _FULL_HISTOGRAM and (unused := (found.histogram == 0).nonzero().flatten().tolist()):
        faults.levels.append(
            Fault(m.file, f"{m.module}.qweight", f"codes {unused} of {1 << m.bits} never occur")
        )
    if found.in_source is False:
        faults.errors.append(Fault(m.file, m.module, f"the source has no matrix [{m.n}, {m.k}] of this name"))
    error, limit = relative_error(found), MAX_RELATIVE_ERROR[m.bits]
    if error is not None and not error <= limit:
        what = f"relative error {error:.3g}, limit {limit:g} at {m.bits} bits"
        faults.errors.append(Fault(m.file, m.module, what))


def _unused_levels(groups: Mapping[tuple[str, int], Sum]) -> Iterator[Fault]:
    """Wide codes: all matrices of a group together must use more than half of the levels."""
    for group in groups.values():
        used = int((group.histogram > 0).sum())
        if group.bits > _FULL_HISTOGRAM and used <= 1 << (group.bits - 1):
            what = f"only {used} of {1 << group.bits} codes occur in {group.matrices} matrices"
            yield Fault("(all files)", group.name, what)


def _compare_plain(
    model: Checkpoint, weights: SourceWeights | None, info: TensorInfo, faults: _Faults
) -> None:
    """Check one unpacked tensor: finite, and equal to the source's."""
    module = module_of(info.name)
    source = weights.checkpoint if weights else None
    twin = source.tensors.get(info.name) if source else None
    same = twin is not None and (twin.dtype, twin.shape) == (info.dtype, info.shape)
    # An expert kept in 16 bit has no tensor of its name in a fused or fp8 source.
    rebuilt = not same and weights is not None and weights.shape(module) == info.shape
    nonfinite, different = 0, False
    for start, stop in _row_pieces(info):
        piece = model.read_rows(info.name, start, stop)
        nonfinite += int((~piece.isfinite()).sum())
        if same and source is not None:
            wanted = source.read_rows(info.name, start, stop)
            different |= not torch.equal(piece.view(torch.uint8), wanted.view(torch.uint8))
        elif rebuilt and weights is not None:
            different |= not torch.equal(piece, weights.rows(module, start, stop).to(piece.dtype))
    if nonfinite:
        faults.values.append(
            Fault(info.file.name, info.name, f"{nonfinite} of {info.numel} values are not finite")
        )
    if different:
        faults.copies.append(Fault(info.file.name, info.name, "is not packed and differs from the source"))
    elif source is not None and not same and not rebuilt:
        what = "the source has no tensor of this name"
        if twin is not None:
            what = f"is {info.dtype} {list(info.shape)}, the source's is {twin.dtype} {list(twin.shape)}"
        faults.copies.append(Fault(info.file.name, info.name, what))


def _row_pieces(info: TensorInfo) -> Iterator[tuple[int, int]]:
    rows = info.shape[0] if info.shape else 0
    step = max(PIECE // max(info.numel // max(rows, 1), 1), 1)
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def _short(row: Sum) -> dict[str, Any]:
    """A row of "matrices": what a reader looks up by name."""
    keys = ("name", "bits", "matrices", "relative_error", "worst_relative_error", "worst_matrix")
    return {key: value for key, value in row.to_dict().items() if key in keys}


@contextmanager
def _pool() -> Iterator[ThreadPoolExecutor]:
    pool = ThreadPoolExecutor(max_workers=min(cpu_count(), MAX_THREADS))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)  # so that Ctrl-C does not wait for all that is queued
