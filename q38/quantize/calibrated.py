"""What every method that tunes on text shares: its texts, its n-gram table, its identity, its clock."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError, ResourceError
from q38.base.memory import peak_memory, reset_peak
from q38.base.units import format_bytes, format_seconds
from q38.checkpoint.index import fingerprint_file
from q38.checkpoint.job import Job
from q38.checkpoint.writer import FileRecord, write_json
from q38.model.text import load_texts
from q38.ple.find import PLE_JSON
from q38.ple.reader import PleTable
from q38.ple.table import read_info
from q38.quantize.calibration import calibration_tokens
from q38.quantize.method import Work
from q38.recipe.samples import host_memory, host_need

if TYPE_CHECKING:
    import torch

COVERAGE = "coverage.json"
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Calibrated:
    """Base of the methods that tune.

    Attributes:
        ple: directory of the split n-gram table, as given.
        table: the n-gram table, None for a model without one.
        threads: CPU threads.
        device: "cpu", or GPU numbers like "0,1".

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

    def identity(self) -> dict[str, Any]:
        source = self.work.source.path
        return {
            "calibration": self.work.recipe.calibration.model_dump(mode="json", exclude={"text"}),
            "text": self._texts.sha256,
            "tokenizer": {n: fingerprint_file(source / n) for n in _TOKENIZER if (source / n).exists()},
            "ngram": _table_identity(self.table),
            "threads": self.threads,  # the last bit of a sum depends on them
            "device": self.device,
        }

    def tokens(self, job: Job) -> torch.Tensor:
        """Calibration tokens, int64 [samples, seqlen]; what they are is recorded and said."""
        from q38.hf.load import load_tokenizer

        work = self.work
        ids, facts = calibration_tokens(
            self._texts, load_tokenizer(work.source.path), work.recipe.calibration
        )
        job.commit("calibration", result=facts.to_dict())
        need = host_need(work.recipe, work.plan.shape, facts.samples, host_memory())
        work.progress.say(
            f"calibration: {facts.samples} x {facts.seqlen} of {facts.tokens_available:,} tokens"
            f" ({facts.origin}); {format_bytes(need.cache)} a cache of block inputs,"
            f" {format_bytes(need.total)} of host memory at most"
        )
        return ids

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


def device_map(name: str) -> str:
    """ "auto" as "cpu" or all GPU numbers; others as they are.

    Raises:
        InputError: neither "auto" nor "cpu" nor numbers.
        ResourceError: this machine has no such GPU.
    """
    if name == "cpu":
        return name
    import torch

    count = torch.cuda.device_count()
    if name == "auto":
        return ",".join(str(i) for i in range(count)) or "cpu"
    if not re.fullmatch(r"\d+(,\d+)*", name):
        raise InputError(f"'{name}' is no device", where="--device", remedy="write auto, cpu, 0 or 0,1")
    missing = next((n for n in name.split(",") if int(n) >= count), None)
    if missing is not None:
        raise ResourceError(
            f"GPU {missing} is not there, this machine has {count}",
            where="--device",
            remedy="write auto, or a smaller number",
        )
    return name


def _table_identity(table: PleTable | None) -> dict[str, Any] | None:
    if table is None:
        return None
    if table.origin.name != PLE_JSON:
        return {"in": "source"}  # its bytes are in the source's fingerprint
    info = read_info(table.origin.parent)
    return {"sha256": info.sha256, "dtype": info.dtype, "weight_scale": info.weight_scale}
