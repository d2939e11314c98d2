"""Method "autoround": every block tuned by AutoRound on calibration text, recorded one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.job import Job, package_versions
from q38.checkpoint.packing import PackedMatrix
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import FileRecord
from q38.model.names import EXPERT
from q38.quantize import autoround
from q38.quantize.adjustments import Run, require_supported
from q38.quantize.blockstate import BlockState
from q38.quantize.calibrated import Calibrated, Meter, report
from q38.quantize.local import grid
from q38.quantize.local.tokens import coverage
from q38.quantize.method import Work
from q38.quantize.runlog import logged_to, named_in
from q38.quantize.shards import write_shard
from q38.quantize.torch_state import compute_dtype

LOG = "autoround.log"


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

    def run(self, job: Job, last: int) -> None:
        work, blocks = self.work, self.work.plan.blocks
        done = self.begin(job, last)
        if done is None:
            return
        ids = self.tokens(job)
        records: dict[int, FileRecord] = {}
        counts: dict[int, list[int]] = {}
        meter = Meter(last + 1 - done, self.device)

        def sink(block: int, matrix: Callable[[str], PackedMatrix]) -> None:
            few = set(self._few(counts[block]))

            def chosen(module: str) -> PackedMatrix:
                match = EXPERT.match(module)
                return self._searched(module) if match and int(match["expert"]) in few else matrix(module)

            records[block] = write_shard(work.out, blocks[block], work.source, chosen, log=file)

        def finished(block: int) -> None:
            own = counts[block]
            seen = {"coverage": coverage(own), "tokens": own, "fallback": self._few(own)}
            outcome = {**log.take_loss(), **meter.lap(), **seen}
            job.commit(blocks[block].unit, files={blocks[block].file: records[block]}, result=outcome)
            work.progress.say(report(block, len(blocks), outcome, meter.eta))
            task.advance(1)

        def ended(block: int) -> None:
            if block == last and last + 1 < len(blocks):
                raise autoround.Stop

        file = job.state / LOG
        with (
            logged_to(file) as log,
            named_in(file),
            work.progress.task("quantize: tuning", last + 1, "blocks", done) as task,
        ):
            state = BlockState(
                job.state,
                done=done,
                total=len(blocks),
                seed=work.recipe.calibration.seed,
                finished=finished,
                started=meter.restart,
                ended=ended,
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
                counts=counts,
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

    def _few(self, counts: list[int]) -> list[int]:
        """Experts with too few tokens to be tuned on."""
        least = self.work.recipe.quantize.experts.min_tokens
        return [e for e, n in enumerate(counts) if n < least]

    def _searched(self, module: str) -> PackedMatrix:
        """Optimal RTN of one matrix of the source: the scales with the least squared error of the weights."""
        bits, size = self.work.plan.bits[module], self.work.plan.group_size
        weights = SourceWeights(self.work.source)
        shape = weights.shape(module)
        assert shape is not None  # the plan found it
        weight = weights.rows(module, 0, shape[0])
        scale = grid.search(weight, torch.ones(shape[1]), bits, size)
        return grid.packed(grid.nearest(weight, scale, bits), scale, bits)
