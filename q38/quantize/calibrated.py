"""What every method that tunes on text shares: its texts, its n-gram table, its identity, its clock."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError
from q38.base.memory import peak_memory, reset_peak
from q38.base.units import format_bytes, format_seconds
from q38.checkpoint.header import read_header
from q38.checkpoint.job import Job, first_difference
from q38.checkpoint.writer import FileRecord, write_json
from q38.model.text import load_texts
from q38.ple.find import PLE_JSON
from q38.ple.reader import PleTable
from q38.ple.table import read_info
from q38.quantize.blockstate import state_file
from q38.quantize.calibration import calibration_tokens
from q38.quantize.devices import device_map, environment, item_bytes
from q38.quantize.method import Work
from q38.recipe.samples import host_memory, host_need

if TYPE_CHECKING:
    import torch

COVERAGE = "coverage.json"


class Calibrated:
    """Base of the methods that tune.

    Attributes:
        ple: directory of the split n-gram table, as given.
        table: the n-gram table, None for a model without one.
        threads: CPU threads.
        device: "cpu", or GPU numbers like "0,1".
        item: bytes of a value of the block inputs there.

    Raises:
        InputError: no calibration text, no n-gram table, or no such kind of device.
        ResourceError: no such GPU.
    """

    def __init__(self, work: Work, *, ple: Path | None, threads: int, device: str) -> None:
        self.work, self.ple = work, ple
        self._texts = load_texts(work.recipe.calibration.text, "calibration")
        self.table: PleTable | None = None
        if work.plan.shape.ngram is not None:
            from q38.hf.load import open_table

            self.table = open_table(work.source, ple)
        self.threads, self.device = threads, device_map(device)
        self.item = item_bytes(self.device)

    def identity(self) -> dict[str, Any]:
        return {
            "calibration": self.work.recipe.calibration.model_dump(mode="json", exclude={"text"}),
            "text": self._texts.sha256,
            "ngram": _table_identity(self.table),
            "threads": self.threads,  # the last bit of a sum depends on them
            "device": self.device,
        }

    def begin(self, job: Job, last: int) -> int | None:
        """The first block to do (zero-based), None if all up to `last` are done.

        Raises:
            InputError: what this block starts from is gone, or an earlier process ran with other packages or on
                another kind of device.
        """
        blocks = self.work.plan.blocks
        done = next((i for i, shard in enumerate(blocks) if shard.unit not in job.done), len(blocks))
        if done > last:
            return None
        self._same_environment(job)
        if done > 0:
            state = state_file(job.state, done)
            try:
                read_header(state)
            except InputError as error:
                raise InputError(
                    f"must be written, and the block inputs it is made from are gone ({state.name}: {error.what})",
                    where=self.work.out / blocks[done].file,
                    remedy="restore one of the two files, or start over with --fresh",
                ) from None
        return done

    def tokens(self, job: Job) -> torch.Tensor:
        """Calibration tokens, int64 [samples, seqlen]; what they are is recorded and said."""
        from q38.hf.load import load_tokenizer

        work = self.work
        ids, facts = calibration_tokens(
            self._texts, load_tokenizer(work.source.path), work.recipe.calibration
        )
        job.commit("calibration", result=facts.to_dict())
        need = host_need(work.recipe, work.plan.shape, facts.samples, host_memory(), self.item)
        work.progress.say(
            f"calibration: {facts.samples} x {facts.seqlen} of {facts.tokens_available:,} tokens"
            f" ({facts.origin}); {format_bytes(need.cache)} a cache of block inputs,"
            f" {format_bytes(need.total)} of host memory at most"
        )
        return ids

    def _same_environment(self, job: Job) -> None:
        """Record what the blocks of this run are made with; every process of it must have the same."""
        unit = "environment"
        found = environment(self.device)
        if unit not in job.done:
            job.commit(unit, result=found)
        elif difference := first_difference(job.done[unit]["result"], found):
            key, before, now = difference
            raise InputError(
                f"was begun with another {key} ({before}, now {now})",
                where=job.out,
                remedy="restore it, or start over with --fresh",
            )

    def extra_files(self, job: Job) -> dict[str, FileRecord]:
        """The tokens of every expert of every block, and the experts that had too few."""
        lists = {
            str(shard.block): {key: job.done[shard.unit]["result"][key] for key in ("tokens", "fallback")}
            for shard in self.work.plan.blocks
        }
        return {COVERAGE: write_json(self.work.out / COVERAGE, lists)}


class Meter:
    """Seconds and peak memory per block, and what the rest will take at the mean of this process.

    Args:
        left: blocks to do.
        devices: as `Calibrated.device`.
    """

    def __init__(self, left: int, devices: str) -> None:
        self._left, self._done = left, 0
        self._gpus = [] if devices == "cpu" else [int(n) for n in devices.split(",")]
        self.restart()

    def restart(self) -> None:
        self._start = self._lap = time.monotonic()
        self._reset()

    def lap(self) -> dict[str, Any]:
        """Of the block just finished: "seconds", "host_peak" in bytes, and "device_peak" of the fullest GPU."""
        now = time.monotonic()
        found: dict[str, Any] = {"seconds": now - self._lap, "host_peak": peak_memory()}
        if self._gpus:
            import torch

            found["device_peak"] = max(torch.cuda.max_memory_allocated(n) for n in self._gpus)
        self._lap = now
        self._done, self._left = self._done + 1, self._left - 1
        self._reset()
        return found

    @property
    def eta(self) -> float:
        return (self._lap - self._start) / self._done * self._left

    def _reset(self) -> None:
        reset_peak()
        if self._gpus:
            import torch

            # Nothing has used CUDA yet where AutoRound tunes, and a reset before it is an "invalid device argument".
            torch.cuda.init()  # type: ignore[no-untyped-call]
            for n in self._gpus:
                torch.cuda.reset_peak_memory_stats(n)


def report(block: int, total: int, outcome: dict[str, Any], eta: float) -> str:
    """One line on a finished block: loss, tokens per expert, peak memory, time."""
    parts = []
    if "loss_after" in outcome:
        parts.append(f"loss {outcome['loss_before']:.3g} -> {outcome['loss_after']:.3g}")
    if "coverage" in outcome:
        seen = outcome["coverage"]
        parts.append(f"tokens per expert {seen['min']} / {seen['median']:.0f} / {seen['max']}")
    if outcome.get("fallback"):
        parts.append(f"{len(outcome['fallback'])} experts by searched scale")
    parts.append(f"{format_bytes(outcome['host_peak'])} of memory")
    if "device_peak" in outcome:
        parts.append(f"{format_bytes(outcome['device_peak'])} on the GPU")
    parts.append(f"{format_seconds(outcome['seconds'])}, ETA {format_seconds(eta)}")
    return f"block {block + 1} of {total}: {', '.join(parts)}"


def _table_identity(table: PleTable | None) -> dict[str, Any] | None:
    if table is None:
        return None
    if table.origin.name != PLE_JSON:
        return {"in": "source"}  # its bytes are in the source's fingerprint
    info = read_info(table.origin.parent)
    return {"sha256": info.sha256, "dtype": info.dtype, "weight_scale": info.weight_scale}
