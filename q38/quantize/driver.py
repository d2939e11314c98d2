"""`q38 quantize`: a source checkpoint to packed matrices, by a recipe, resumable after every block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from q38.base import settings
from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import Checkpoint, fingerprint_file, read_json
from q38.checkpoint.job import MANIFEST, Job
from q38.checkpoint.writer import require_free_space
from q38.quantize.method import Method, Work
from q38.quantize.output import check_written, copied_files, write_metadata
from q38.quantize.plan import describe, make_plan
from q38.quantize.sources import require_source
from q38.recipe.samples import with_samples
from q38.recipe.schema import Recipe
from q38.recipe.scratch import scratch_bytes


def quantize(
    source: Path,
    out: Path,
    recipe: Recipe,
    *,
    ple: Path | None = None,
    blocks: str | None = None,
    threads: int | None = None,
    device: str = "auto",
    dry_run: bool = False,
    fresh: bool = False,
    progress: Progress = SILENT,
) -> dict[str, Any]:
    """Quantize a checkpoint.

    Args:
        source: bf16 or FP8 release; not changed.
        out: directory to fill; a run killed at any point goes on with the same call.
        recipe: bits per group, method and calibration.
        ple: the split n-gram table; default: the table in `source`, else one beside it.
        blocks: "N" or "0-N", for a trial: stop after block N; the same call without it goes on there.
        threads: CPU threads, default all cores. Part of the identity of a tuned run.
        device: "auto" (all CUDA GPUs, else the CPU), "cpu", or AutoRound's device map ("0", "0,1").
        dry_run: write nothing; return what would be written (`q38.quantize.plan.describe`).

    Returns:
        complete: False after a trial. method, bits (group -> width -> matrices), group_size, tensors, bytes.
        blocks: per block its index, seconds, and loss_before, loss_after and best_iter where tuned; where each
            expert has its own tokens, coverage (min, median, max) and fallback (experts with too few).
        calibration: what it was tuned on (`q38.quantize.calibration.Facts`), None if it was not.

    Raises:
        InputError: bad source, recipe, table or blocks; another version of AutoRound; `out` belongs to
            another run, or was begun with other packages or on another kind of device.
        ResourceError: AutoRound is missing, the disk or the memory is too small.
        CheckFailed: AutoRound did not do what the recipe says.
    """
    checkpoint, out = Checkpoint.open(source), Path(out)
    require_source(checkpoint, recipe)
    plan = make_plan(checkpoint, recipe)
    last = last_block(blocks, len(plan.blocks))
    # After the checks: what follows imports torch.
    device, item = _device(recipe, device, planned=dry_run)
    recipe = with_samples(recipe, checkpoint.config, item=item, check=not dry_run)
    if dry_run:
        return describe(plan, recipe, item)
    from q38.quantize.rounding import write_rounded

    work = Work(checkpoint, out, plan, recipe, progress)
    method = _method(work, ple=ple, threads=threads or settings.cpu_count(), device=device)
    identity = {
        "source": checkpoint.fingerprint,
        "quantize": recipe.quantize.model_dump(mode="json"),
        "copied": {path.name: fingerprint_file(path) for path in copied_files(checkpoint)},
        **method.identity(),
    }
    with Job(
        out, "quantize", identity, inputs=(source, ple), below_input=True, fresh=fresh, progress=progress
    ) as job:
        if job.up_to_date:
            progress.say(f"{out} is up to date")
            return dict(read_json(out / MANIFEST)["result"])
        require_free_space(out, _space(work, job, item))
        write_rounded(work, job, [shard for shard in plan.shards if shard.block is None])
        method.run(job, last)
        if any(shard.unit not in job.done for shard in plan.shards):
            return _result(work, job, complete=False)
        files = write_metadata(out, checkpoint, plan, recipe, method.facts())
        job.commit("metadata", files={**files, **method.extra_files(job)})
        check_written(Checkpoint.open(out), plan)
        result = _result(work, job, complete=True)
        job.finish(result)
        return result


def last_block(blocks: str | None, total: int) -> int:
    """The last block to do: "3" and "0-3" both mean 3; None means all.

    Raises:
        InputError: not of that form, not from block 0, or beyond the last block.
    """
    if blocks is None:
        return total - 1
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", blocks.strip())
    if match is None:
        raise InputError(f"'{blocks}' is no range of blocks", where="--blocks", remedy="write it like 0-3")
    first, last = int(match[1] or 0), int(match[2])
    if first != 0:
        raise InputError(
            f"starts at block {first}, but each block is tuned on the output of those before it",
            where="--blocks",
            remedy=f"write 0-{last}",
        )
    if last >= total:
        raise InputError(
            f"ends at block {last}, the last one is {total - 1}",
            where="--blocks",
            remedy=f"write 0-{total - 1}",
        )
    return last


def _device(recipe: Recipe, device: str, *, planned: bool) -> tuple[str, int]:
    """(the device in full, bytes of a value of the block inputs there); "" for a method that tunes nothing.

    planned: GPUs that are named need not be in this machine.
    """
    if recipe.quantize.experts.method == "rtn":
        return "", 0
    from q38.quantize.devices import device_map, item_bytes

    device = device_map(device, absent=planned)
    return device, item_bytes(device)


def _space(work: Work, job: Job, item: int) -> int:
    """Bytes of disk that the rest of the run needs."""
    left = [shard for shard in work.plan.shards if shard.unit not in job.done]
    scratch = 0
    if any(shard.block is not None for shard in left):
        held = sum(path.stat().st_size for path in job.state.glob("*.safetensors"))
        samples = work.recipe.calibration.samples
        scratch = max(scratch_bytes(work.recipe, work.plan.shape, samples, item) - held, 0)
    return sum(shard.nbytes for shard in left) + scratch


def _method(work: Work, *, ple: Path | None, threads: int, device: str) -> Method:
    name = work.recipe.quantize.experts.method
    if name == "rtn":
        from q38.quantize.rounding import Rounding

        return Rounding(work)
    if name == "autoround":
        from q38.quantize.tuning import Tuning

        return Tuning(work, ple=ple, threads=threads, device=device)
    from q38.quantize.local.method import LocalTuning

    return LocalTuning(work, ple=ple, threads=threads, device=device)


def _result(work: Work, job: Job, *, complete: bool) -> dict[str, Any]:
    plan = work.plan
    blocks = [
        {"block": shard.block, **_without_lists(job.done[shard.unit]["result"])}
        for shard in plan.blocks
        if shard.unit in job.done
    ]
    return {
        "complete": complete,
        "method": work.recipe.quantize.experts.method,
        "bits": plan.bits_by_group(),
        "group_size": plan.group_size,
        "tensors": sum(len(shard.parts) for shard in plan.shards),
        "bytes": plan.nbytes,
        "blocks": blocks,
        "seconds": sum(block["seconds"] for block in blocks),
        "calibration": (job.done.get("calibration") or {}).get("result"),
    }


def _without_lists(outcome: dict[str, Any]) -> dict[str, Any]:
    """A block's record without the tokens of every expert, which have a file of their own."""
    return {key: value for key, value in outcome.items() if key != "tokens"}
