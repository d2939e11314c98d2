"""One measured request, and several of them sent at once.

Definitions, from the client's monotonic clock and the server's own token counts:
    time to first token   from sending the request to the first piece of the answer that carries something
    time to last token    from sending the request to the piece with the finish reason
    prefill tokens/s      prompt tokens / time to first token (queueing and the first decoding step count too)
    decode tokens/s       tokens after the first piece / (time to last token - time to first token)
    time between tokens   time between two pieces; a piece of n tokens counts as n tokens that share it evenly
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from q38.serving.client import Reply, ServerError

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class Sample:
    """One answer. Times in seconds; `sent_s` since its round began, the others since it was sent.

    pieces: streamed pieces that carried something.
    steps: (seconds, tokens) from piece to piece, after the first one.
    first_piece_tokens: tokens that the first piece carried.
    counted: how the tokens of a piece are known: "by the server", "one a piece", or "on average" (then `steps`
        has the mean in place of each piece's own count).
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    sent_s: float
    first_token_s: float
    last_token_s: float
    pieces: int
    first_piece_tokens: float
    steps: tuple[tuple[float, float], ...]
    counted: str

    @property
    def decode_tokens_per_s(self) -> float | None:
        """None where everything came in one piece: no time between tokens was seen."""
        span = self.last_token_s - self.first_token_s
        later = self.completion_tokens - self.first_piece_tokens
        return later / span if self.pieces > 1 and span > 0 and later > 0 else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "sent_s": self.sent_s,
            "first_token_s": self.first_token_s,
            "last_token_s": self.last_token_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "pieces": self.pieces,
            "counted": self.counted,
            "between_tokens_ms": between_tokens([self]),
        }


@dataclass(frozen=True)
class Round:
    """Requests sent at the same moment. One alone is a round too."""

    samples: tuple[Sample, ...]

    @property
    def first_token_s(self) -> float:
        return statistics.median(s.first_token_s for s in self.samples)

    @property
    def last_token_s(self) -> float:
        return statistics.median(s.last_token_s for s in self.samples)

    @property
    def prefill_tokens_per_s(self) -> float:
        """All prompt tokens / time until the last request had its first token."""
        begun = max(s.sent_s + s.first_token_s for s in self.samples)
        return sum(s.prompt_tokens for s in self.samples) / begun

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Of one request, the median."""
        rates = [rate for s in self.samples if (rate := s.decode_tokens_per_s) is not None]
        return statistics.median(rates) if rates else None

    @property
    def output_tokens_per_s(self) -> float:
        """All generated tokens / time until the last request ended."""
        end = max(s.sent_s + s.last_token_s for s in self.samples)
        return sum(s.completion_tokens for s in self.samples) / end

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "first_token_s": self.first_token_s,
            "last_token_s": self.last_token_s,
            "prefill_tokens_per_s": self.prefill_tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "output_tokens_per_s": self.output_tokens_per_s,
            "requests": [s.to_dict() for s in self.samples],
        }


def as_sample(reply: Reply, *, where: str, sent_s: float = 0.0) -> Sample:
    """The figures of one answer.

    Raises:
        ServerError: no token counts, no visible piece, or fewer than two tokens.
    """
    prompt, total, first = reply.prompt_tokens, reply.completion_tokens, reply.first_token_s
    if prompt is None or total is None:
        raise ServerError("the server sends no token counts (usage)", where=where)
    if first is None:
        raise ServerError(f"none of {total} tokens was visible", where=where)
    if total < 2:
        raise ServerError(
            f"the answer ended after {total} tokens ({reply.finish_reason}); speed needs at least 2",
            where=where,
        )
    first_piece, steps, counted = _steps(reply, total)
    return Sample(
        prompt_tokens=prompt,
        completion_tokens=total,
        cached_tokens=reply.cached_tokens,
        sent_s=sent_s,
        first_token_s=first,
        last_token_s=reply.end_s,
        pieces=len(reply.deltas),
        first_piece_tokens=first_piece,
        steps=tuple(steps),
        counted=counted,
    )


def between_tokens(samples: Sequence[Sample]) -> dict[str, float] | None:
    """Mean, percentiles and maximum of the time between tokens in ms, over all samples; None without a step."""
    steps = [step for s in samples for step in s.steps]
    if not steps:
        return None
    seconds, tokens = np.array(steps, dtype=np.float64).T  # [steps] each
    each = 1000 * seconds / tokens
    result = {f"p{q}": weighted_percentile(each, tokens, q) for q in PERCENTILES}
    return {"mean": float(1000 * seconds.sum() / tokens.sum()), **result, "max": float(each.max())}


def weighted_percentile(values: Any, weights: Any, q: float) -> float:
    """The smallest value below or at which at least q % of the weight lies.

    Args:
        values, weights: [n] floats; weights positive.
    """
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    index = np.searchsorted(reached, q / 100 * reached[-1] * (1 - 1e-12))
    return float(values[order][min(index, len(order) - 1)])


def _steps(reply: Reply, total: int) -> tuple[float, list[tuple[float, float]], str]:
    """Tokens of the first piece, the steps after it, and how tokens were counted."""
    times = [delta.at for delta in reply.deltas]
    counts = [delta.tokens for delta in reply.deltas]
    known = [n for n in counts if n is not None]
    if len(known) == len(counts) and known[0] >= 1 and all(a <= b for a, b in pairwise([*known, total])):
        return known[0], _by_count([*times, reply.end_s], [*known, total]), "by the server"
    if len(times) in (total, total - 1):  # the token that ends a turn shows nothing
        return 1, [(b - a, 1) for a, b in pairwise(times)], "one a piece"
    # The first piece is taken to be as large as the others: counting it as one token would flatter the speed.
    mean = total / len(times)
    return mean, [(b - a, mean) for a, b in pairwise(times)], "on average"


def _by_count(times: Sequence[float], counts: Sequence[int]) -> list[tuple[float, float]]:
    """Steps between the pieces at which the count rose; two pieces can belong to one decoding step."""
    steps: list[tuple[float, float]] = []
    since, seen = times[0], counts[0]
    for at, count in zip(times, counts, strict=True):
        if count > seen:
            steps.append((at - since, count - seen))
            since, seen = at, count
    return steps
