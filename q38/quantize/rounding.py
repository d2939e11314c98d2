"""Method "rtn", and every shard outside the blocks: matrices rounded to nearest, read row by row from the source."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from q38.checkpoint.job import Job
from q38.checkpoint.packing import PackedMatrix
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import FileRecord
from q38.quantize.method import Work
from q38.quantize.plan import Shard
from q38.quantize.rtn import round_rows
from q38.quantize.shards import write_shard


class Rounding:
    """The method that needs no calibration; see `q38.quantize.method.Method`."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def identity(self) -> dict[str, Any]:
        return {}

    def run(self, job: Job, last: int) -> None:
        write_rounded(self._work, job, self._work.plan.blocks[: last + 1])

    def facts(self) -> dict[str, Any]:
        return {"iters": 0}

    def extra_files(self, job: Job) -> dict[str, FileRecord]:
        del job
        return {}


def write_rounded(work: Work, job: Job, shards: Sequence[Shard]) -> None:
    """Write and commit the shards that `job.done` lacks.

    Raises:
        InputError: the source is damaged.
        ResourceError: the disk is full.
    """
    left = [shard for shard in shards if shard.unit not in job.done]
    if not left:
        return
    weights, plan = SourceWeights(work.source), work.plan

    def matrix(module: str) -> PackedMatrix:
        shape = weights.shape(module)
        assert shape is not None  # the plan found it
        n, k = shape
        return round_rows(
            lambda start, stop: weights.rows(module, start, stop), n, k, plan.bits[module], plan.group_size
        )

    with work.progress.task("quantize: writing", sum(shard.nbytes for shard in left)) as task:
        for shard in left:
            task.note(shard.unit)
            started = time.monotonic()
            record = write_shard(work.out, shard, work.source, matrix, written=task.advance)
            job.commit(shard.unit, files={shard.file: record}, result={"seconds": time.monotonic() - started})
