"""Methods "expert-local", "expert-local-gsq" and "opt-rtn": block after block, each expert on its own tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from q38.base import settings as environment
from q38.base.errors import ResourceError
from q38.base.progress import Task
from q38.base.units import format_bytes
from q38.checkpoint.job import Job
from q38.checkpoint.packing import PackedMatrix
from q38.checkpoint.writer import FileRecord
from q38.model.names import EXPERT
from q38.quantize.blockstate import BlockState
from q38.quantize.calibrated import Calibrated, Meter, report
from q38.quantize.local.block import outputs, quantize_experts, summary
from q38.quantize.local.memory import Sizes, experts_at_once, free_bytes
from q38.quantize.local.settings import Settings
from q38.quantize.local.store import Expert, Store
from q38.quantize.local.walk import Walk
from q38.quantize.method import Work
from q38.quantize.shards import write_shard
from q38.quantize.torch_state import compute_dtype, fixed_torch
from q38.recipe.samples import cache_bytes


class LocalTuning(Calibrated):
    """See `q38.quantize.method.Method`.

    Every matrix that is no routed expert is rounded to nearest, before the experts of its block are tuned.

    Args:
        ple: the split n-gram table; default: the table in the source, else one beside it.
        threads: CPU threads.
        device: "auto", "cpu", or GPU numbers like "0" or "0,1"; the experts of a block are split over them.

    Raises:
        InputError: no calibration text, or no n-gram table.
    """

    def __init__(self, work: Work, *, ple: Path | None, threads: int, device: str) -> None:
        super().__init__(work, ple=ple, threads=threads, device=device)
        plan, calibration = work.plan, work.recipe.calibration
        self._settings = Settings.of(
            work.recipe.quantize.experts,
            bits=plan.base_bits,
            group_size=plan.group_size,
            seed=calibration.seed,
        )
        names = [f"cuda:{n}" for n in self.device.split(",")] if self.device != "cpu" else ["cpu"]
        self._devices = [torch.device(name) for name in names]

    def run(self, job: Job, last: int) -> None:
        work, blocks = self.work, self.work.plan.blocks
        done = self.begin(job, last)
        if done is None:
            return
        ids = self.tokens(job)
        with (
            _memory_in_one_line(),
            environment.exported({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}),  # deterministic products on CUDA
            fixed_torch(self.threads),
            work.progress.task(
                "quantize: experts",
                (last + 1) * work.plan.shape.num_experts,
                "experts",
                done * work.plan.shape.num_experts,
            ) as task,
        ):
            walk = Walk(
                work.source.path, work.plan, self.ple, ids,
                dtype=compute_dtype(self.device), device=self._devices[0],
            )  # fmt: skip
            self._at_once = self._batch_size(job, ids)
            meter, store = Meter(last + 1 - done, self.device), Store(job.state)
            record: FileRecord | None = None
            outcome: dict[str, Any] = {}

            def finished(block: int) -> None:
                # Called once the activations are safe, and before those of the block before go.
                assert record is not None
                outcome.update(meter.lap())
                job.commit(blocks[block].unit, files={blocks[block].file: record}, result=outcome)
                work.progress.say(report(block, len(blocks), outcome, meter.eta))

            state = BlockState(
                job.state, done=done, total=len(blocks), seed=self._settings.seed, finished=finished
            )
            states = state.load_q_input() or walk.start()
            for block in range(done, last + 1):
                states, record, outcome = self._block(walk, block, states, store, task)
                state.mark_block_done(blocks[block].unit, states, None)
                store.clear()

    def facts(self) -> dict[str, Any]:
        calibration = self.work.recipe.calibration
        return {
            "expert_method": self._settings.method,
            "iters": self._settings.steps,
            "nsamples": calibration.samples,
            "seqlen": calibration.seqlen,
        }

    def _block(
        self, walk: Walk, block: int, states: list[torch.Tensor], store: Store, task: Task
    ) -> tuple[list[torch.Tensor], FileRecord, dict[str, Any]]:
        plan = self.work.plan
        half = walk.half(block, states)
        counts = half.routed.counts
        experts = quantize_experts(
            block,
            lambda which, where: walk.experts(block, which, where),
            half.routed,
            self._settings,
            at_once=self._at_once,
            devices=self._devices,
            store=store,
            finished=task.advance,
        )
        outcome = {**summary(experts, counts, self._settings), "tokens": counts}
        record = write_shard(
            self.work.out,
            plan.blocks[block],
            self.work.source,
            lambda name: _matrix(name, half.packed, experts),
        )
        with torch.no_grad():
            following = walk.whole(half, outputs(experts, half.routed, self._settings.bits))
        return following, record, outcome

    def _batch_size(self, job: Job, ids: torch.Tensor) -> int:
        """Experts at once: chosen from the free memory once, then kept, since a killed run must go on with the same."""
        unit = "expert batches"
        if unit not in job.done:
            shape = self.work.plan.shape
            sizes = Sizes(
                shape.hidden_size,
                shape.moe_intermediate_size,
                shape.num_experts,
                shape.num_experts_per_tok,
                ids.numel(),
            )
            free = min(free_bytes(device) for device in self._devices)
            cuda = self._devices[0].type == "cuda"
            if not cuda:  # what enters a block and what leaves it lie in the same memory
                free -= 2 * cache_bytes(self.work.recipe, shape, len(ids), self.item)
            count = experts_at_once(sizes, self._settings, free, cuda=cuda, devices=len(self._devices))
            job.commit(unit, result={"experts": count, "free_bytes": free})
            self.work.progress.say(f"{count} experts at once in {format_bytes(free)} of free memory")
        return int(job.done[unit]["result"]["experts"])


@contextmanager
def _memory_in_one_line() -> Iterator[None]:
    try:
        yield
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise ResourceError(
            "out of memory while tuning experts",
            where="memory" if isinstance(error, MemoryError) else "GPU memory",
            remedy="end other programs there and run again, or lower quantize.experts.max_tokens and start over with --fresh",
        ) from error


def _matrix(name: str, packed: dict[str, PackedMatrix], experts: dict[int, Expert]) -> PackedMatrix:
    if match := EXPERT.match(name):
        matrix: PackedMatrix = getattr(experts[int(match["expert"])], match["proj"])
        return matrix
    return packed[name]
