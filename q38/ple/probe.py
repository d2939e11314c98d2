"""How many n-gram rows a second a disk delivers, and what that means in tokens."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.data import data_path
from q38.model.shape import ModelShape
from q38.ple.aio import DEPTH, AioQueue
from q38.ple.reader import PleTable

ONE_BY_ONE = 200  # reads
TOGETHER = 20_000


@dataclass(frozen=True)
class PleProbe:
    """Random reads of single rows.

    direct: past the page cache; otherwise the rates are those of the page cache.
    iops_1, iops: rows a second one after the other, and many at once. p50_ms, p99_ms: of one read alone.
    step_ms: the rows of one token, read together, as decoding waits for them. tokens_per_s: what a prompt can take at most.
    sparse: the file has holes, which no disk is asked for, so the rates mean nothing.
    """

    file: str
    rows: int
    rows_per_token: int
    direct: bool
    sparse: bool
    iops_1: float
    p50_ms: float
    p99_ms: float
    depth: int
    iops: float
    step_ms: float
    tokens_per_s: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def rows_per_token(directory: Path, model: Path | None = None) -> int:
    """Rows that one token looks up, by the config.json of `model`, of the table's parent, or of the release.

    Raises:
        InputError: no Qwen4-Exp config, or one without an n-gram table.
    """
    beside = directory.absolute().parent / "config.json"
    file = model / "config.json" if model else beside
    if model is None and not beside.is_file():
        file = data_path("assets", "models", "qwen3.8-flash-next.json")
    ngram = ModelShape.from_config(read_json(file), where=str(file)).ngram
    if ngram is None:
        raise InputError(
            "has no n-gram table", where=file, remedy="give the model that the table was split from"
        )
    return ngram.heads


def probe_table(directory: Path, *, rows_per_token: int, seed: int | None = None) -> PleProbe:
    """Read random rows of a split table for a second or two.

    Args:
        seed: of the rows; by default others at every call, since a second read of a row measures a cache.

    Raises:
        InputError: no such table, or it cannot be read.
    """
    table = PleTable.open(directory)
    random = np.random.default_rng(seed)
    assert table.file is not None
    try:
        queue: AioQueue | None = AioQueue(table.file)
    except OSError:
        queue = None

    def read(count: int) -> float:
        ids = np.unique(random.integers(0, table.num_rows, count))
        begun = time.perf_counter()
        if queue is None:
            table.stored(ids)
        else:
            queue.read(ids * table.row_bytes, table.row_bytes)
        return time.perf_counter() - begun

    alone = sorted(read(1) for _ in range(ONE_BY_ONE))
    steps = sorted(read(rows_per_token) for _ in range(ONE_BY_ONE // 4))
    together = min(TOGETHER, table.num_rows)
    iops = together / read(together)
    stat = table.file.stat()
    if queue is not None:
        queue.close()
    table.close()
    return PleProbe(
        file=str(table.file),
        rows=table.num_rows,
        rows_per_token=rows_per_token,
        direct=queue is not None,
        sparse=stat.st_blocks * 512 < stat.st_size // 2,
        iops_1=len(alone) / sum(alone),
        p50_ms=alone[len(alone) // 2] * 1e3,
        p99_ms=alone[len(alone) * 99 // 100] * 1e3,
        depth=DEPTH if queue is not None else 1,
        iops=iops,
        step_ms=steps[len(steps) // 2] * 1e3,
        tokens_per_s=iops / rows_per_token,
    )
