"""The scratch files of `q38 requant-int8`: one per rounded matrix, words [K/4, N] and then scales [K/g, N]."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.int8 import BITS, Deviation, Errors, deviation, round_int8
from q38.checkpoint.job import Job
from q38.checkpoint.packing import pack, symmetric_zeros
from q38.checkpoint.paths import read_chunks
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import tensor_bytes, writing
from q38.quantize.requant_plan import Matrix, differs

COPY = 2**22  # bytes copied at a time
_CHUNK = 2**22  # weights whose codes a thread collects before it writes them
_SLICE = 2**18  # weights rounded at a time: about what a core's cache holds


def scratch_directory(job: Job) -> Path:
    """Where the files lie."""
    return job.state / "int8"


def scratch_file(job: Job, matrix: Matrix) -> Path:
    """The file of one matrix."""
    return scratch_directory(job) / matrix.module


def round_matrix(
    job: Job, matrix: Matrix, *, model: Checkpoint, weights: SourceWeights, clip_search: bool
) -> Deviation:
    """Round one matrix into its scratch file, a chunk of rows at a time.

    Raises:
        InputError: the model's matrix is another than the source's, or a weight is not finite.
        ResourceError: the disk is full.
    """
    n, k, g = matrix.n, matrix.k, matrix.group_size
    rows, step = max(_CHUNK // k, 1), max(_SLICE // k, 1)
    codes = torch.empty(min(rows, n), k, dtype=torch.uint8)
    scales = torch.empty(min(rows, n), k // g, dtype=torch.float16)
    # Taken once: thousands of small tensors kept between large temporary ones would break the heap up.
    error, norm = torch.empty(n, k // g), torch.empty(n, k // g)
    clipped = 0
    path = scratch_file(job, matrix)
    with writing(path), path.open("wb") as raw:
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            for first in range(start, stop, step):
                last = min(first + step, stop)
                weight = weights.rows(matrix.module, first, last)  # [n, K]
                part = round_int8(weight, g, clip_search=clip_search)
                _require_finite(part.scales, matrix, weights)
                if not torch.equal(model.read_rows(matrix.weight, first, last).float(), weight):
                    raise differs(matrix.weight, weights.checkpoint)
                codes[first - start : last - start] = part.codes
                scales[first - start : last - start] = part.scales
                error[first:last], norm[first:last] = part.errors.squared_error, part.errors.squared_norm
                clipped += part.errors.clipped
            _put_columns(raw.fileno(), 0, pack(codes[: stop - start].t(), BITS), start, n)
            _put_columns(raw.fileno(), n * k, scales[: stop - start].t().contiguous(), start, n)
        os.fsync(raw.fileno())
    return deviation([Errors(error, norm, clipped)], g)


def _require_finite(scales: torch.Tensor, matrix: Matrix, weights: SourceWeights) -> None:
    """A scale shows it: the largest magnitude of a group is NaN or infinite if one of its weights is."""
    if not torch.isfinite(scales).all():
        raise InputError(
            f"tensor {matrix.weight} holds a value that is infinite, not a number or beyond 16 bit",
            where=weights.checkpoint.path,
            remedy="download the source again; q38 inspect --deep checks all of it",
        )


def _put_columns(fd: int, base: int, block: torch.Tensor, start: int, columns: int) -> None:
    """Write [R, n] as columns [start, start + n) of a matrix [R, columns] that begins at byte `base`."""
    data, size = tensor_bytes(block), block.element_size()
    width = block.shape[1] * size
    for row in range(block.shape[0]):
        piece = data[row * width : (row + 1) * width]
        position = base + (row * columns + start) * size
        while len(piece):
            written = os.pwrite(fd, piece, position)
            piece, position = piece[written:], position + written


def packed_bytes(job: Job, matrix: Matrix) -> Iterator[bytes | memoryview]:
    """The bytes of a matrix's three tensors, from its scratch file."""
    zeros = tensor_bytes(symmetric_zeros(matrix.k // matrix.group_size, matrix.n, BITS))
    at, codes = 0, matrix.n * matrix.k  # one byte per weight, then the scales
    for piece in read_chunks(scratch_file(job, matrix), COPY):
        before = max(codes - at, 0)
        yield piece[:before]
        if 0 <= codes - at < len(piece):
            yield zeros
        yield piece[before:]
        at += len(piece)
