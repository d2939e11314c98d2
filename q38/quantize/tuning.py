"""Method "autoround": every block tuned by AutoRound on calibration text, recorded one by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from q38.base.units import format_bytes, format_seconds
from q38.checkpoint.index import fingerprint_file
from q38.checkpoint.job import Job, package_versions
from q38.checkpoint.packing import PackedMatrix
from q38.checkpoint.writer import FileRecord
from q38.model.text import load_texts
from q38.ple.find import PLE_JSON
from q38.ple.reader import PleTable
from q38.ple.table import read_info
from q38.quantize import autoround
from q38.quantize.adjustments import Run, require_supported
from q38.quantize.blockstate import BlockState
from q38.quantize.calibration import calibration_tokens
from q38.quantize.method import Work
from q38.quantize.runlog import logged_to, named_in
from q38.quantize.shards import write_shard

LOG = "autoround.log"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_CACHES = 4  # two chains of activations, the new ones written before the old ones go


class Tuning:
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
        self._work = work
        self._texts = load_texts(work.recipe.calibration.text, "calibration")
        self._table: PleTable | None = None
        if work.plan.shape.ngram is not None:
            from q38.hf.load import open_table

            self._table = open_table(work.source, ple)
        self._threads, self._device = threads, _device(device)

    def identity(self) -> dict[str, Any]:
        source = self._work.source.path
        return {
            "calibration": self._work.recipe.calibration.model_dump(mode="json", exclude={"text"}),
            "text": self._texts.sha256,
            "tokenizer": {n: fingerprint_file(source / n) for n in _TOKENIZER if (source / n).exists()},
            "ngram": _table_identity(self._table),
            "threads": self._threads,  # the last bit of a sum depends on them
            "device": self._device,
        }

    def scratch_bytes(self) -> int:
        return _CACHES * self._work.plan.calibration_bytes

    def run(self, job: Job, last: int) -> None:
        work, blocks = self._work, self._work.plan.blocks
        done = next((i for i, shard in enumerate(blocks) if shard.unit not in job.done), len(blocks))
        if done > last:
            return
        from q38.hf.load import load_tokenizer

        recipe = work.recipe.calibration
        ids, facts = calibration_tokens(self._texts, load_tokenizer(work.source.path), recipe)
        job.commit("calibration", result=facts.to_dict())
        work.progress.say(
            f"calibration: {facts.samples} x {facts.seqlen} of {facts.tokens_available:,} tokens"
            f" ({facts.origin}); {format_bytes(work.plan.calibration_bytes)} a cache of block inputs"
        )
        records: dict[int, FileRecord] = {}
        clock = _Clock(last + 1 - done)

        def sink(block: int, matrix: Callable[[str], PackedMatrix]) -> None:
            records[block] = write_shard(work.out, blocks[block], work.source, matrix)

        def finished(block: int) -> None:
            outcome = {**log.take_loss(), "seconds": clock.lap()}
            job.commit(blocks[block].unit, files={blocks[block].file: records[block]}, result=outcome)
            work.progress.say(_report(block, len(blocks), outcome, clock.eta))
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
                seed=recipe.seed,
                finished=finished,
                started=clock.restart,
            )
            autoround.tune(
                work.source.path,
                work.plan,
                work.recipe,
                ids,
                Run(self._table, state, autoround.compute_dtype(self._device)),
                sink,
                scratch=job.state,
                device=self._device,
                threads=self._threads,
            )

    def facts(self) -> dict[str, Any]:
        recipe = self._work.recipe
        return {
            "autoround_version": package_versions()["auto-round"],
            "iters": recipe.quantize.experts.iters,
            "enable_alg_ext": recipe.quantize.experts.alg_ext,
            "nsamples": recipe.calibration.samples,
            "seqlen": recipe.calibration.seqlen,
            "batch_size": recipe.quantize.experts.batch_size,
        }


class _Clock:
    """Seconds per block, and what the rest will take at the mean of this process."""

    def __init__(self, left: int) -> None:
        self._left, self._done = left, 0
        self.restart()

    def restart(self) -> None:
        self._start = self._lap = time.monotonic()

    def lap(self) -> float:
        now = time.monotonic()
        seconds, self._lap = now - self._lap, now
        self._done, self._left = self._done + 1, self._left - 1
        return seconds

    @property
    def eta(self) -> float:
        return (self._lap - self._start) / self._done * self._left


def _report(block: int, total: int, outcome: dict[str, float], eta: float) -> str:
    loss = ""
    if "loss_after" in outcome:
        loss = f"loss {outcome['loss_before']:.3g} -> {outcome['loss_after']:.3g}, "
    return (
        f"block {block + 1} of {total}: {loss}{format_seconds(outcome['seconds'])}, ETA {format_seconds(eta)}"
    )


def _table_identity(table: PleTable | None) -> dict[str, Any] | None:
    if table is None:
        return None
    if table.origin.name != PLE_JSON:
        return {"in": "source"}  # its bytes are in the source's fingerprint
    info = read_info(table.origin.parent)
    return {"sha256": info.sha256, "dtype": info.dtype, "weight_scale": info.weight_scale}


def _device(name: str) -> str:
    if name != "auto":
        return name
    import torch

    return ",".join(str(i) for i in range(torch.cuda.device_count())) or "cpu"
