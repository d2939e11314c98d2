"""The figures of one cell: medians over its rounds, percentiles over all its requests and tokens."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from q38.measure.bench.plan import COLD, Cell
from q38.measure.bench.rounds import Series
from q38.measure.bench.sample import PERCENTILES, Round, between_tokens


def summarize(cell: Cell, series: Series, server: dict[str, Any], *, complete: bool = True) -> dict[str, Any]:
    """A cell of the result (docs/bench.md).

    Args:
        series: holds at least one round of the cell's prefix.
        server: figures by the server itself (q38.measure.bench.counters).
        complete: False where a request failed later on.
    """
    rounds = series.measured[cell.prefix]
    samples = [s for r in rounds for s in r.samples]
    cached = [s.cached_tokens for s in samples if s.cached_tokens is not None]
    counted = {s.counted for s in samples}
    return {
        "depth": cell.depth,
        "concurrency": cell.concurrency,
        "prefix": cell.prefix,
        "complete": complete,
        "prompt_tokens": statistics.median_low(s.prompt_tokens for s in samples),
        "cached_tokens": statistics.median_low(cached) if cached else None,
        "completion_tokens": statistics.median_low(s.completion_tokens for s in samples),
        "warmup": {"rounds": len(series.warmup), "steady": series.steady},
        "first_token_s": _spread([s.first_token_s for s in samples]),
        "last_token_s": _spread([s.last_token_s for s in samples]),
        # With a warm prefix most prompt tokens are not computed, so there is no such rate.
        "prefill_tokens_per_s": _median([r.prefill_tokens_per_s for r in rounds])
        if cell.prefix == COLD
        else None,
        "decode_tokens_per_s": decode_rate(rounds),
        "output_tokens_per_s": _median([r.output_tokens_per_s for r in rounds]),
        "between_tokens_ms": between_tokens(samples),
        "tokens_per_piece": sum(s.completion_tokens for s in samples) / sum(s.pieces for s in samples),
        "counted": counted.pop() if len(counted) == 1 else "mixed",
        "server": server,
        "rounds": [r.to_dict() for r in rounds],
    }


def decode_rate(rounds: Sequence[Round]) -> float | None:
    """Median over the rounds; None where no round saw time between tokens."""
    return _median([rate for r in rounds if (rate := r.decode_tokens_per_s) is not None])


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {f"p{q}": float(np.percentile(values, q)) for q in PERCENTILES}


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None
