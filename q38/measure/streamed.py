"""Source and model over the same sequences, block by block: neither is ever whole in memory.

Three residual streams pass through each block: the source's, the source's again under another experts
implementation and batch size (the noise floor), and the model's. A block of the source is loaded once for the first
two and let go before the model's is loaded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from q38.base.progress import SILENT, Progress, Task
from q38.checkpoint.job import Job
from q38.hf.blocks import BlockModel, LoadedBlock
from q38.measure.forward import Run
from q38.measure.stats import Floats
from q38.measure.streams import Stream

SOURCE, FLOOR, MODEL = NAMES = ("source", "floor", "model")
STREAMS = "streams"  # folder of the job's state
FORWARDS = 3  # of every block over every token


@dataclass(frozen=True)
class Outcome:
    """Two runs over the same sequences: what came out of the last block, and the error of every block.

    layers: per block {"layer", "relative_error", "standard_error", "floor", "own"}; see `Error`.
    floor_kind: what the floor changes.
    """

    source: Run
    floor: Run
    model: Run
    layers: list[dict[str, Any]]
    floor_kind: str


class Error:
    """Relative error ||x - x_ref|| / ||x_ref|| of a block's output, summed by sequence."""

    def __init__(self, sequences: int) -> None:
        self._error, self._norm = np.zeros(sequences), np.zeros(sequences)

    def add(self, start: int, ours: torch.Tensor, reference: torch.Tensor) -> None:
        """[B, T, W] of sequences `start` on."""
        own = slice(start, start + len(ours))
        wanted = reference.float()
        self._error[own] = (ours.float() - wanted).flatten(1).square().sum(1, dtype=torch.float64).numpy()
        self._norm[own] = wanted.flatten(1).square().sum(1, dtype=torch.float64).numpy()

    def value(self) -> tuple[float, float | None]:
        """The error over all sequences, and its standard error, clustered by sequence.

        r = sum e / sum n is a ratio of sums over G sequences: its variance by linearization is
        G / (G - 1) * sum (e_g - r n_g)^2 / (sum n)^2 (see `q38.measure.stats`), and that of sqrt(r) follows.
        """
        total, groups = self._norm.sum(), len(self._norm)
        ratio = float(self._error.sum() / total) if total else math.nan
        if groups < 2 or not ratio > 0:
            return math.sqrt(ratio) if ratio >= 0 else math.nan, None
        residuals: Floats = self._error - ratio * self._norm
        spread = math.sqrt(groups / (groups - 1) * float((residuals**2).sum())) / float(total)
        return math.sqrt(ratio), spread / (2 * math.sqrt(ratio))


@contextmanager
def streamed(
    source: BlockModel,
    model: BlockModel,
    ids: torch.Tensor,
    *,
    batch_size: int,
    job: Job | None = None,
    progress: Progress = SILENT,
) -> Iterator[Outcome]:
    """Pass all sequences through both models.

    Args:
        source, model: of one shape and dtype.
        ids: int64 [sequences, T].
        batch_size: sequences at a time; the floor takes one at a time.
        job: keeps the streams on disk and commits every finished block ("block N"); None: in memory.

    Yields:
        the outcome; its output heads have weights until the body ends.
    """
    from q38.hf.hooks import qsa_shortcut

    total, layers = ids.numel(), source.shape.num_layers
    done = 0 if job is None else sum(f"block {i}" in job.done for i in range(layers))
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode())
        stack.enter_context(qsa_shortcut())
        with source.other_experts() as floor_experts:
            floor_kind = f"the source against itself: experts {floor_experts}, batch size {batch_size} -> 1"
        walk = _Walk(source, model, ids, batch_size, job, done)
        with progress.task("quality: blocks", FORWARDS * layers * total, "tokens") as task:
            task.advance(FORWARDS * done * total)
            for index in range(done, layers):
                task.note(f"block {index + 1} of {layers}")
                row = walk.block(index, task)
                if job is not None:
                    job.commit(f"block {index}", result=row)
                walk.finished(row)
        rows = walk.rows if job is None else [job.done[f"block {i}"]["result"] for i in range(layers)]
        heads = {id(m): stack.enter_context(m.head()) for m in (source, model)}
        runs = [
            Run(*walk.final(name, m, *heads[id(m)]))
            for name, m in zip(NAMES, (source, source, model), strict=True)
        ]
        yield Outcome(runs[0], runs[1], runs[2], rows, floor_kind)


class _Walk:
    def __init__(
        self,
        source: BlockModel,
        model: BlockModel,
        ids: torch.Tensor,
        batch_size: int,
        job: Job | None,
        done: int,
    ) -> None:
        self._source, self._model, self._ids, self._batch = source, model, ids, batch_size
        directory = None
        if job is not None:
            directory = job.state / STREAMS
            directory.mkdir(exist_ok=True)
        shape = (len(ids), ids.shape[1], source.width)
        # The embedding is step 1 of a stream on disk, block i is step i + 2.
        self._streams = {
            name: Stream(name, shape, source.dtype, directory=directory, step=done + 1 if done else 0)
            for name in NAMES
        }
        self.rows: list[dict[str, Any]] = []
        # Evenly over all sequences, so that every language has a share.
        self._sample = torch.linspace(0, len(ids) - 1, min(batch_size, len(ids))).long()
        if not done:
            self._embed()

    def block(self, index: int, task: Task) -> dict[str, Any]:
        """Pass all streams through one block."""
        reference = self._streams[SOURCE]
        entering = torch.cat([reference.read(int(i), int(i) + 1) for i in self._sample])
        with self._source.block(index) as block:
            self._run(SOURCE, block, self._batch, None, task)
            reference.advance()
            floor = Error(len(self._ids))
            with self._source.other_experts():
                self._run(FLOOR, block, 1, floor, task)
        leaving = torch.cat([reference.read(int(i), int(i) + 1) for i in self._sample])
        with self._model.block(index) as block:
            drift, own = Error(len(self._ids)), Error(len(self._sample))
            self._run(MODEL, block, self._batch, drift, task)
            own.add(0, block(entering, self._ids[self._sample]), leaving)
        for name in (FLOOR, MODEL):
            self._streams[name].advance()
        value, error = drift.value()
        return {
            "layer": index,
            "relative_error": _finite(value),
            "standard_error": _finite(error),
            "floor": _finite(floor.value()[0]),
            "own": _finite(own.value()[0]),
        }

    def finished(self, row: dict[str, Any]) -> None:
        """The block is recorded: what it was made from can go."""
        self.rows.append(row)
        for stream in self._streams.values():
            stream.drop_old()

    def final(self, name: str, model: BlockModel, mixer: Any, matrix: torch.Tensor) -> tuple[Any, Any]:
        """Final hidden states [sequences, T, H] on the CPU, and the output head."""
        hidden = []
        for start in range(0, len(self._ids), self._batch):
            x = self._streams[name].read(start, min(start + self._batch, len(self._ids)))
            hidden.append(mixer(x.to(model.device)).cpu())

        def head(states: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(states.to(model.device), matrix)

        return torch.cat(hidden), head

    def _embed(self) -> None:
        for name, stream in self._streams.items():
            model = self._model if name == MODEL else self._source
            for start in range(0, len(self._ids), self._batch):
                stream.write(start, model.embed(self._ids[start : start + self._batch]))
            stream.advance()
            stream.drop_old()

    def _run(self, name: str, block: LoadedBlock, batch: int, error: Error | None, task: Task) -> None:
        stream, reference = self._streams[name], self._streams[SOURCE]
        for start in range(0, len(self._ids), batch):
            ids = self._ids[start : start + batch]
            out = block(stream.read(start, start + len(ids)), ids)
            if error is not None:
                error.add(start, out, reference.read(start, start + len(ids)))
            stream.write(start, out)
            task.advance(ids.numel())


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
