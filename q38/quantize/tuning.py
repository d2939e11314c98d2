"""Method "autoround": every block tuned by AutoRound on calibration text, recorded one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from q38.checkpoint.job import Job, package_versions
from q38.checkpoint.packing import PackedMatrix
from q38.checkpoint.writer import FileRecord
from q38.quantize import autoround
from q38.quantize.adjustments import Run, require_supported
from q38.quantize.blockstate import BlockState
from q38.quantize.calibrated import Calibrated, Clock, report
from q38.quantize.method import Work
from q38.quantize.runlog import logged_to, named_in
from q38.quantize.shards import write_shard
from q38.quantize.torch_state import compute_dtype

LOG = "autoround.log"
_CACHES = 4  # two chains of activations, the new ones written before the old ones go


class Tuning(Calibrated):
    """See `q38.quantize.method.Method`.

    Args:
        ple: the split n-gram table; default: the table in the source, else one beside it.
        threads: CPU threads.
        device: "auto", "cpu", or AutoRound's device map.

    Raises:
        ResourceError: AutoRound is not installed.
        InputError: another version of it is; no calibration text, or no n-gram table.
    """

    def __init__(self, work: Work, *, ple: Path | None, threads: int, device: str) -> None:
        require_supported()
        super().__init__(work, ple=ple, threads=threads, device=device)

    def scratch_bytes(self) -> int:
        return _CACHES * self.work.plan.calibration_bytes

    def run(self, job: Job, last: int) -> None:
        work, blocks = self.work, self.work.plan.blocks
        done = next((i for i, shard in enumerate(blocks) if shard.unit not in job.done), len(blocks))
        if done > last:
            return
        ids = self.tokens(job)
        records: dict[int, FileRecord] = {}
        clock = Clock(last + 1 - done)

        def sink(block: int, matrix: Callable[[str], PackedMatrix]) -> None:
            records[block] = write_shard(work.out, blocks[block], work.source, matrix)

        def finished(block: int) -> None:
            outcome = {**log.take_loss(), "seconds": clock.lap()}
            job.commit(blocks[block].unit, files={blocks[block].file: records[block]}, result=outcome)
            work.progress.say(report(block, len(blocks), outcome, clock.eta))
            task.advance(1)
            if block == last and last + 1 < len(blocks):
                raise autoround.Stop

        file = job.state / LOG
        with (
            logged_to(file) as log,
            named_in(file),
            work.progress.task("quantize: tuning", last + 1, "blocks") as task,
        ):
            task.advance(done)
            state = BlockState(
                job.state,
                done=done,
                total=len(blocks),
                seed=work.recipe.calibration.seed,
                finished=finished,
                started=clock.restart,
            )
            autoround.tune(
                work.source.path,
                work.plan,
                work.recipe,
                ids,
                Run(self.table, state, compute_dtype(self.device)),
                sink,
                scratch=job.state,
                device=self.device,
                threads=self.threads,
            )

    def facts(self) -> dict[str, Any]:
        recipe = self.work.recipe
        return {
            "autoround_version": package_versions()["auto-round"],
            "iters": recipe.quantize.experts.steps,
            "enable_alg_ext": recipe.quantize.experts.alg_ext,
            "nsamples": recipe.calibration.samples,
            "seqlen": recipe.calibration.seqlen,
            "batch_size": recipe.quantize.experts.batch_size,
        }
