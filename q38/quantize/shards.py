"""Writes the shards of a plan: packed matrices from a method, everything else from the source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from q38.base.errors import CheckFailed, InputError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix, symmetric_zero, symmetric_zeros
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import FileRecord, dtype_name, stream_safetensors, tensor_bytes
from q38.quantize.plan import Part, Shard
from q38.quantize.sources import BLOCK_SCALE

Matrices = Callable[[str], PackedMatrix]
_CHUNK = 2**24  # bytes copied at a time


def write_shard(
    out: Path,
    shard: Shard,
    source: Checkpoint,
    matrices: Matrices,
    *,
    written: Callable[[int], None] = lambda n: None,
    log: Path | None = None,
) -> FileRecord:
    """Write one shard atomically.

    Args:
        out: the output directory.
        matrices: module name -> its packed matrix; asked once for each packed module, in order.
        written: told the bytes of each tensor as it is written.
        log: of the method, for a failure to name.

    Raises:
        CheckFailed: a packed matrix is not what the plan says.
        InputError: the source is damaged, or a weight is infinite, not a number or too large for a float16 scale.
        ResourceError: the disk is full.
    """
    entries = [(part.name, part.dtype, part.shape, part.nbytes) for part in shard.parts]
    return stream_safetensors(out / shard.file, entries, _data(shard, source, matrices, written, log))


def check_matrix(part: Part, tensor: torch.Tensor, bits: int, *, log: Path | None = None) -> None:
    """Refuse a packed tensor of another shape or dtype, a zero point off the centre, a scale that is no number.

    Raises:
        CheckFailed: with the tensor and what is wrong with it.
    """
    found = (dtype_name(tensor.dtype), tuple(tensor.shape))
    if found != (part.dtype, part.shape):
        _fail(
            part, log, f"came out as {found[0]} {list(found[1])}, planned is {part.dtype} {list(part.shape)}"
        )
    if part.name.endswith(".qzeros"):
        groups, words = part.shape
        if not torch.equal(tensor.cpu(), symmetric_zeros(groups, words * 32 // bits, bits)):
            _fail(part, log, f"has zero points other than {1 << (bits - 1)}")
    if part.name.endswith(".scales") and not bool(torch.isfinite(tensor).all()):
        _fail(part, log, "has a scale that is infinite or not a number")


def _data(
    shard: Shard,
    source: Checkpoint,
    matrices: Matrices,
    written: Callable[[int], None],
    log: Path | None,
) -> Iterator[memoryview | bytearray]:
    widths = _widths(shard)
    matrix: dict[str, torch.Tensor] = {}
    for part in shard.parts:
        if part.kind == "packed":
            if part.name not in matrix:
                packed = matrices(part.module)
                matrix = {f"{part.module}.{field}": t for field, t in packed._asdict().items()}
            tensor = matrix.pop(part.name)
            if part.name.endswith(".scales") and not bool(torch.isfinite(tensor).all()):
                _require_weights(SourceWeights(source), part.module, widths[part.module])
            check_matrix(part, tensor, widths[part.module], log=log)
            yield tensor_bytes(tensor.cpu())
        elif part.kind == "dequantize":
            codes, scales = source.read(part.name), source.read(part.module + BLOCK_SCALE)
            yield tensor_bytes(dequantize_blocks(codes, scales))
        else:
            yield from _copy(source, part)
        written(part.nbytes)


def _copy(source: Checkpoint, part: Part) -> Iterator[bytearray]:
    name = part.fused or part.name
    for start in range(0, part.nbytes, _CHUNK):
        stop = min(start + _CHUNK, part.nbytes)
        yield source.read_bytes(name, part.begin + start, part.begin + stop)


def _widths(shard: Shard) -> Mapping[str, int]:
    """Module -> bits, from the planned shapes: qzeros [G, N * bits / 32] beside scales [G, N]."""
    shapes = {part.name: part.shape for part in shard.parts if part.kind == "packed"}
    return {m: shapes[f"{m}.qzeros"][1] * 32 // shapes[f"{m}.scales"][1] for m in shard.packed}


def _require_weights(weights: SourceWeights, module: str, bits: int) -> None:
    """Whether it is the source's weights that make a scale which is no number."""
    shape = weights.shape(module)
    assert shape is not None  # the plan found it
    step = max(_CHUNK // shape[1], 1)
    for start in range(0, shape[0], step):
        peak = weights.rows(module, start, min(start + step, shape[0])).abs().max()
        if not torch.isfinite((peak / symmetric_zero(bits)).to(torch.float16)):
            raise InputError(
                f"{module} holds a weight that is infinite, not a number or too large for a float16 scale",
                where=weights.checkpoint.path,
                remedy="download the source again; q38 inspect --deep checks all of it",
            )


def _fail(part: Part, log: Path | None, what: str) -> None:
    report = f"report it with {log}" if log else "run again with --fresh, and report it if it comes back"
    raise CheckFailed(f"{part.name} {what}", where=part.module, remedy=report)
