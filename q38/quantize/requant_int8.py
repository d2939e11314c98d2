"""`q38 requant-int8`: dense matrices of a quantized checkpoint re-packed to INT8 from the source's weights.

Two passes. Rounding: each matrix goes to a scratch file in the job's state, several at a time. Then
every shard of the model is written anew under its name, with the packed tensors in place of the 16-bit
ones. Memory is a few chunks per thread, whatever the size of a matrix.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from q38.base import settings
from q38.base.errors import CheckFailed, InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import INDEX, Checkpoint, fingerprint_file, read_json
from q38.checkpoint.int8 import BITS, Deviation, Errors, deviation, round_int8
from q38.checkpoint.job import MANIFEST, Job
from q38.checkpoint.packing import pack, symmetric_zeros
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import (
    FileRecord,
    copy_file,
    require_free_space,
    stream_safetensors,
    tensor_bytes,
    write_json,
    writing,
)
from q38.quantize.requant_plan import CONFIG, Entry, Matrix, Plan, extra_files, make_plan, stored_bits
from q38.recipe.bits import check_resolution, fused_modules, quantization_config
from q38.recipe.resolve import HIGH
from q38.recipe.schema import Recipe

_CHUNK = 2**22  # weights whose codes a thread collects before it writes them
_SLICE = 2**18  # weights rounded at a time: about what a core's cache holds
_COPY = 2**22  # bytes copied at a time
T = TypeVar("T")
R = TypeVar("R")


def requant_int8(
    model: Path,
    out: Path,
    *,
    source: Path,
    recipe: Recipe,
    threads: int | None = None,
    dry_run: bool = False,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Write `model` again with the matrices of the recipe's groups in INT8, rounded from `source`.

    A matrix whose relative error exceeds recipe.requant_int8.max_relative_error stays in 16 bit, and with
    it the other members of its fused module. Nothing else changes, and no input is touched.

    Args:
        model: what `q38 quantize` wrote with the same recipe.
        out: directory to fill; a killed run goes on with the same call.
        source: the bf16 or FP8 release that `model` was made from.
        threads: matrices rounded at a time, default all cores; the result does not depend on it.
        dry_run: write nothing; return what would be done.

    Returns:
        {"matrices": [{"module", "bits", "relative_error", ...}], "kept": [modules in 16 bit], "tensors",
        "bytes", "not_copied"}; with dry_run {"matrices", "bytes"} without errors.

    Raises:
        InputError: model, source and recipe do not belong together, or a weight is not finite.
        ResourceError: the disk is full or too small.
    """
    checkpoint, weights = Checkpoint.open(model), SourceWeights(Checkpoint.open(source))
    plan = make_plan(checkpoint, weights, recipe)
    if dry_run:
        return _describe(checkpoint, plan)
    identity = {
        "model": checkpoint.fingerprint | {p.name: fingerprint_file(p) for p in extra_files(checkpoint)},
        "source": weights.checkpoint.fingerprint,
        "requant_int8": recipe.requant_int8.model_dump(mode="json"),
    }
    with Job(out, "requant-int8", identity, fresh=fresh) as job:
        if job.up_to_date:
            progress.say(f"{out} is up to date")
            return dict(read_json(out / MANIFEST)["result"])
        workers = threads or settings.cpu_count()
        _require_space(job, checkpoint, plan)
        _round_all(job, plan, weights, recipe.requant_int8.clip_search, workers, progress)
        kept = _kept(job, plan, recipe.requant_int8.max_relative_error)
        shards = _write_shards(job, checkpoint, plan, kept, workers, progress)
        _write_metadata(job, checkpoint, plan, kept, recipe, shards)
        result = _result(job, checkpoint, plan, kept)
        job.finish(result)
        return result


def _describe(model: Checkpoint, plan: Plan) -> dict[str, Any]:
    replaced = sum(model.info(m.weight).nbytes for m in plan.matrices)
    packed = sum(m.nbytes for m in plan.matrices)
    rows = [{"module": m.module, "shape": [m.n, m.k], "bits": BITS, "bytes": m.nbytes} for m in plan.matrices]
    return {"matrices": rows, "bytes": model.nbytes - replaced + packed}


def _require_space(job: Job, model: Checkpoint, plan: Plan) -> None:
    """Refuse before the first byte: what is still to be written, rounded matrices in scratch included."""
    left = sum(m.nbytes for m in plan.matrices if _unit(m) not in job.done)
    left += sum(
        h.data_start + sum(t.nbytes for t in h.tensors.values())
        for file, h in model.headers.items()
        if file not in job.done
    )
    require_free_space(job.out, left + sum(p.stat().st_size for p in extra_files(model)))


def _round_all(
    job: Job, plan: Plan, weights: SourceWeights, clip_search: bool, workers: int, progress: Progress
) -> None:
    """Round every matrix into scratch, the largest first so that no thread is left alone with it."""
    todo = sorted((m for m in plan.matrices if _unit(m) not in job.done), key=lambda m: (-m.nbytes, m.module))
    with writing(job.state):
        _scratch(job).mkdir(exist_ok=True)
    total = sum(2 * m.n * m.k for m in plan.matrices)
    with progress.task("requant-int8: rounding", total) as task, _one_thread_each():
        task.advance(total - sum(2 * m.n * m.k for m in todo))
        rounding = partial(_round_matrix, job, weights=weights, clip_search=clip_search)
        for matrix, found in _parallel(rounding, todo, workers):
            job.commit(_unit(matrix), result=asdict(found))
            task.advance(2 * matrix.n * matrix.k)
            task.note(matrix.module)


def _round_matrix(job: Job, matrix: Matrix, *, weights: SourceWeights, clip_search: bool) -> Deviation:
    """Round one matrix, a chunk of rows at a time, into its scratch file: words [K/4, N], then scales [K/g, N]."""
    n, k, g = matrix.n, matrix.k, matrix.group_size
    rows, step = max(_CHUNK // k, 1), max(_SLICE // k, 1)
    codes = torch.empty(min(rows, n), k, dtype=torch.uint8)
    scales = torch.empty(min(rows, n), k // g, dtype=torch.float16)
    # Taken once: thousands of small tensors kept between large temporary ones would break the heap up.
    error, norm = torch.empty(n, k // g), torch.empty(n, k // g)
    clipped = 0
    path = _scratch_file(job, matrix)
    with writing(path), path.open("wb") as raw:
        for start in range(0, n, rows):
            stop = min(start + rows, n)
            for first in range(start, stop, step):
                last = min(first + step, stop)
                weight = weights.rows(matrix.module, first, last)  # [n, K]
                part = round_int8(weight, g, clip_search=clip_search)
                _require_finite(part.scales, matrix, weights)
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


def _kept(job: Job, plan: Plan, limit: float) -> dict[str, str]:
    """Module -> why it stays in 16 bit."""
    kept: dict[str, str] = {}
    for matrix in plan.matrices:
        error = job.done[_unit(matrix)]["result"]["relative_error"]
        if error > limit:
            kept[matrix.module] = f"relative error {error:.4f} > {limit:g}"
    for members in fused_modules(plan.after).values():
        if failed := next((m for m in members if m in kept), None):
            for module in members:
                kept.setdefault(module, f"one matrix with {failed} in the server")
    return kept


def _write_shards(
    job: Job, model: Checkpoint, plan: Plan, kept: Mapping[str, str], workers: int, progress: Progress
) -> dict[str, list[Entry]]:
    """Write every shard of the model anew under its name. Returns file name -> its tensors."""
    packed = {m.weight: m for m in plan.matrices if m.module not in kept}
    entries = {file: _entries(header.tensors, packed) for file, header in model.headers.items()}
    todo = [file for file in entries if file not in job.done]
    sizes = {file: sum(nbytes for *_, nbytes in rows) for file, rows in entries.items()}

    def write(file: str) -> FileRecord:
        infos = model.headers[file].tensors
        if not packed.keys() & infos.keys():
            return copy_file(model.path / file, job.out / file)
        metadata = model.headers[file].metadata
        return stream_safetensors(job.out / file, entries[file], _data(job, model, infos, packed), metadata)

    with progress.task("requant-int8: writing", sum(sizes.values())) as task:
        task.advance(sum(sizes[file] for file in entries if file in job.done))
        for file, record in _parallel(write, todo, min(workers, 4)):
            job.commit(file, files={file: record})
            for weight in packed.keys() & model.headers[file].tensors.keys():
                _scratch_file(job, packed[weight]).unlink(missing_ok=True)
            task.advance(sizes[file])
            task.note(file)
    return entries


def _entries(infos: Mapping[str, TensorInfo], packed: Mapping[str, Matrix]) -> list[Entry]:
    rows: list[Entry] = []
    for name, info in infos.items():
        rows += packed[name].entries if name in packed else [(name, info.dtype, info.shape, info.nbytes)]
    return rows


def _data(
    job: Job, model: Checkpoint, infos: Mapping[str, TensorInfo], packed: Mapping[str, Matrix]
) -> Iterator[bytes | bytearray | memoryview]:
    for name, info in infos.items():
        if name not in packed:
            for start in range(0, info.nbytes, _COPY):
                yield model.read_bytes(name, start, min(start + _COPY, info.nbytes))
            continue
        matrix = packed[name]
        with _scratch_file(job, matrix).open("rb") as raw:
            left = matrix.n * matrix.k  # bytes of qweight: one per weight
            while left:
                piece = raw.read(min(_COPY, left))
                if not piece:
                    raise OSError(f"{raw.name} is shorter than it was written")
                left -= len(piece)
                yield piece
            yield tensor_bytes(symmetric_zeros(matrix.k // matrix.group_size, matrix.n, BITS))
            while piece := raw.read(_COPY):
                yield piece


def _write_metadata(
    job: Job,
    model: Checkpoint,
    plan: Plan,
    kept: Mapping[str, str],
    recipe: Recipe,
    shards: Mapping[str, list[Entry]],
) -> None:
    """Write the index, config.json and the other files, then read the whole back by both engines' rules."""
    bits = {m: HIGH if m in kept else width for m, width in plan.after.items()}
    found = model.config["quantization_config"]
    config = {**model.config, "quantization_config": {**found, **quantization_config(bits, recipe)}}
    index = {
        "metadata": {"total_size": sum(nbytes for rows in shards.values() for *_, nbytes in rows)},
        "weight_map": {name: file for file, rows in shards.items() for name, *_ in rows},
    }
    files = {p.name: copy_file(p, job.out / p.name) for p in extra_files(model)}
    files[INDEX] = write_json(job.out / INDEX, index)
    files[CONFIG] = write_json(job.out / CONFIG, config)
    job.commit("metadata", files=files)
    written = Checkpoint.open(job.out)
    for module, width in bits.items():
        if (stored := stored_bits(written, module)) != width:
            raise CheckFailed(
                f"{module} was written at {stored} bits, planned were {width}",
                where=job.out,
                remedy="run again with --fresh, and report it if it comes back",
            )
    check_resolution(written.config["quantization_config"], bits)


def _result(job: Job, model: Checkpoint, plan: Plan, kept: Mapping[str, str]) -> dict[str, Any]:
    rows = [
        {
            "module": m.module,
            "shape": [m.n, m.k],
            "bits": HIGH if m.module in kept else BITS,
            **job.done[_unit(m)]["result"],
            "kept": kept.get(m.module),
        }
        for m in plan.matrices
    ]
    written = Checkpoint.open(job.out)
    manifest = model.path / MANIFEST
    before = (read_json(manifest).get("result") or {}) if manifest.exists() else {}
    return {
        "calibration": before.get("calibration"),  # so that verify can tell its text from it
        "matrices": rows,
        "kept": sorted(kept),
        "tensors": len(written.tensors),
        "bytes": written.nbytes,
        "not_copied": sorted(
            p.name for p in model.path.iterdir() if p.is_dir() and not p.name.startswith(".")
        ),
    }


def _unit(matrix: Matrix) -> str:
    return f"round {matrix.module}"


def _scratch(job: Job) -> Path:
    return job.state / "int8"


def _scratch_file(job: Job, matrix: Matrix) -> Path:
    return _scratch(job) / matrix.module


def _parallel(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[tuple[T, R]]:
    """(item, result) as each finishes, `workers` at a time. The first failure stops what has not begun."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """torch's own threads off: matrices are the unit of parallel work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
