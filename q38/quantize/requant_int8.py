"""`q38 requant-int8`: dense matrices of a quantized checkpoint re-packed to INT8 from the source's weights.

Two passes. Rounding: each matrix goes to a scratch file in the job's state, several at a time. Then
every shard of the model is written anew under its name, with the packed tensors in place of the 16-bit
ones. Memory is a few chunks per thread, whatever the size of a matrix.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from q38.base import settings
from q38.base.errors import CheckFailed
from q38.base.progress import SILENT, Progress
from q38.base.threads import one_torch_thread
from q38.checkpoint.header import Header, TensorInfo
from q38.checkpoint.index import INDEX, Checkpoint, fingerprint_file, read_json
from q38.checkpoint.int8 import BITS
from q38.checkpoint.job import MANIFEST, Job, read_manifest
from q38.checkpoint.paths import read_chunks
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import (
    FileRecord,
    copy_file,
    require_free_space,
    require_hash,
    stream_safetensors,
    write_json,
    writing,
)
from q38.quantize.requant_plan import (
    CONFIG,
    Entry,
    Matrix,
    Plan,
    extra_files,
    make_plan,
    stored_bits,
)
from q38.quantize.requant_scratch import COPY, packed_bytes, round_matrix, scratch_directory, scratch_file
from q38.recipe.bits import check_resolution, fused_modules, quantization_config
from q38.recipe.resolve import HIGH
from q38.recipe.schema import Recipe

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
        InputError: model, source and recipe do not belong together; a file of `model` is not what its manifest
            says; a weight is not finite; `out` shares a directory with an input.
        ResourceError: the disk is full or too small.
    """
    checkpoint, weights = Checkpoint.open(model), SourceWeights(Checkpoint.open(source))
    plan = make_plan(checkpoint, weights, recipe)
    if dry_run:
        return _describe(checkpoint, plan)
    hashes = _hashes(checkpoint)
    identity = {
        "model": checkpoint.fingerprint | {p.name: fingerprint_file(p) for p in extra_files(checkpoint)},
        "source": weights.checkpoint.fingerprint,
        "requant_int8": recipe.requant_int8.model_dump(mode="json"),
    }
    with Job(
        out,
        "requant-int8",
        identity,
        inputs=(model, source),
        below_input=True,
        fresh=fresh,
        progress=progress,
    ) as job:
        if job.up_to_date:
            progress.say(f"{out} is up to date")
            return dict(read_json(out / MANIFEST)["result"])
        workers = threads or settings.cpu_count()
        _forget_lost(job, checkpoint, plan)
        _require_space(job, checkpoint, plan)
        clip_search = recipe.requant_int8.clip_search
        _round_all(job, plan, checkpoint, weights, clip_search, workers, progress)
        kept = _kept(job, plan, recipe.requant_int8.max_relative_error)
        shards = _write_shards(job, checkpoint, plan, kept, hashes, workers, progress)
        _write_metadata(job, checkpoint, plan, kept, recipe, shards, hashes)
        result = _result(job, checkpoint, plan, kept)
        job.finish(result)
        return result


def _hashes(model: Checkpoint) -> dict[str, str]:
    """sha256 of each file by the model's manifest, empty without one; small files are compared with it here.

    Raises:
        InputError: a small file is not what the manifest says.
    """
    manifest = read_manifest(model.path) or {"files": {}}
    hashes = {name: str(record["sha256"]) for name, record in manifest["files"].items()}
    for file in (model.path / CONFIG, model.path / INDEX, *extra_files(model)):
        if file.name in hashes:
            digest = hashlib.sha256()
            for chunk in read_chunks(file):
                digest.update(chunk)
            require_hash(file, digest.hexdigest(), hashes[file.name])
    return hashes


def _describe(model: Checkpoint, plan: Plan) -> dict[str, Any]:
    replaced = sum(model.info(m.weight).nbytes for m in plan.matrices)
    packed = sum(m.nbytes for m in plan.matrices)
    rows = [{"module": m.module, "shape": [m.n, m.k], "bits": BITS, "bytes": m.nbytes} for m in plan.matrices]
    return {"matrices": rows, "bytes": model.nbytes - replaced + packed}


def _forget_lost(job: Job, model: Checkpoint, plan: Plan) -> None:
    """Round a matrix again whose scratch file is gone while its shard is still, or again, to be written."""
    for matrix in plan.matrices:
        shard, file = model.info(matrix.weight).file.name, scratch_file(job, matrix)
        if shard in job.done or (file.is_file() and file.stat().st_size == matrix.scratch_bytes):
            continue
        job.done.pop(_unit(matrix), None)


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
    job: Job,
    plan: Plan,
    model: Checkpoint,
    weights: SourceWeights,
    clip_search: bool,
    workers: int,
    progress: Progress,
) -> None:
    """Round every matrix into scratch, the largest first so that no thread is left alone with it."""
    todo = sorted((m for m in plan.matrices if _unit(m) not in job.done), key=lambda m: (-m.nbytes, m.module))
    with writing(job.state):
        scratch_directory(job).mkdir(exist_ok=True)
    total = sum(2 * m.n * m.k for m in plan.matrices)
    before = total - sum(2 * m.n * m.k for m in todo)
    with progress.task("requant-int8: rounding", total, done=before) as task, one_torch_thread():
        rounding = partial(round_matrix, job, model=model, weights=weights, clip_search=clip_search)
        for matrix, found in _parallel(rounding, todo, workers):
            job.commit(_unit(matrix), result=asdict(found))
            task.advance(2 * matrix.n * matrix.k)
            task.note(matrix.module)


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
    job: Job,
    model: Checkpoint,
    plan: Plan,
    kept: Mapping[str, str],
    hashes: Mapping[str, str],
    workers: int,
    progress: Progress,
) -> dict[str, list[Entry]]:
    """Write every shard of the model anew under its name, each compared with its hash. Returns file name -> its tensors."""
    packed = {m.weight: m for m in plan.matrices if m.module not in kept}
    entries = {file: _entries(header.tensors, packed) for file, header in model.headers.items()}
    todo = [file for file in entries if file not in job.done]
    sizes = {file: sum(nbytes for *_, nbytes in rows) for file, rows in entries.items()}

    def write(file: str) -> FileRecord:
        infos = model.headers[file].tensors
        if not packed.keys() & infos.keys():
            return copy_file(model.path / file, job.out / file, sha256=hashes.get(file))
        header = model.headers[file]
        data = _data(job, model, header, packed, hashes.get(file))
        return stream_safetensors(job.out / file, entries[file], data, header.metadata)

    before = sum(sizes[file] for file in entries if file in job.done)
    with progress.task("requant-int8: writing", sum(sizes.values()), done=before) as task:
        for file, record in _parallel(write, todo, min(workers, 4)):
            job.commit(file, files={file: record})
            for weight in packed.keys() & model.headers[file].tensors.keys():
                scratch_file(job, packed[weight]).unlink(missing_ok=True)
            task.advance(sizes[file])
            task.note(file)
    return entries


def _entries(infos: Mapping[str, TensorInfo], packed: Mapping[str, Matrix]) -> list[Entry]:
    rows: list[Entry] = []
    for name, info in infos.items():
        rows += packed[name].entries if name in packed else [(name, info.dtype, info.shape, info.nbytes)]
    return rows


def _data(
    job: Job, model: Checkpoint, header: Header, packed: Mapping[str, Matrix], recorded: str | None
) -> Iterator[bytes | bytearray | memoryview]:
    """The new shard's bytes. All of the old one is read on the way, to tell that it is what `recorded` hashes."""
    digest = hashlib.sha256(len(header.raw).to_bytes(8, "little") + header.raw)
    for name, info in header.tensors.items():  # in file order, and a header leaves no gap between them
        whole = info.nbytes if name not in packed or recorded is not None else 0
        for start in range(0, whole, COPY):
            piece = model.read_bytes(name, start, min(start + COPY, info.nbytes))
            digest.update(piece)
            if name not in packed:
                yield piece
        if name in packed:
            yield from packed_bytes(job, packed[name])
    require_hash(header.file, digest.hexdigest(), recorded)


def _write_metadata(
    job: Job,
    model: Checkpoint,
    plan: Plan,
    kept: Mapping[str, str],
    recipe: Recipe,
    shards: Mapping[str, list[Entry]],
    hashes: Mapping[str, str],
) -> None:
    """Write the index, config.json and the other files, then read the whole back by both engines' rules."""
    bits = {m: HIGH if m in kept else width for m, width in plan.after.items()}
    found = model.config["quantization_config"]
    config = {**model.config, "quantization_config": {**found, **quantization_config(bits, recipe)}}
    index = {
        "metadata": {"total_size": sum(nbytes for rows in shards.values() for *_, nbytes in rows)},
        "weight_map": {name: file for file, rows in shards.items() for name, *_ in rows},
    }
    files = {p.name: copy_file(p, job.out / p.name, sha256=hashes.get(p.name)) for p in extra_files(model)}
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
    before = (read_manifest(model.path) or {}).get("result") or {}
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


def _parallel(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[tuple[T, R]]:
    """(item, result) as each finishes, `workers` at a time. The first failure stops what has not begun."""
    with ThreadPoolExecutor(workers) as pool:
        futures = {pool.submit(work, item): item for item in items}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
