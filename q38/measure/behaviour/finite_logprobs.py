"""Log-probabilities are numbers, none above zero, and the greedy token is the most probable one."""

from __future__ import annotations

import math
from typing import Any

from q38.measure.behaviour.row import Row, protocol
from q38.measure.behaviour.target import Target, optional

_TOP = 5
_ROUNDING = 1e-3  # nats; servers compute them in float32 and some round
_TOKENS = 24


def check(target: Target) -> list[Row]:
    """Log-probabilities of an answer, and of its prompt where the server is SGLang."""
    with optional("logprobs"):
        answer = target.ask("Name three rivers.", max_tokens=_TOKENS, logprobs=True, top_logprobs=_TOP)
    faults = [] if answer.logprobs else ["logprobs were accepted and none came"]
    for i, entry in enumerate(answer.logprobs):
        faults += [f"token {i}: {fault}" for fault in entry_faults(entry)]
    values = target.score("The three longest rivers of Europe are") if target.native else []
    faults += [f"prompt token {i + 1}: {value}" for i, value in enumerate(values) if not _is_logprob(value)]
    count = len(answer.logprobs) + len(values)
    return [protocol("finite-logprobs", faults, checked=count, unit="tokens")]


def entry_faults(entry: dict[str, Any]) -> list[str]:
    """What is wrong with the log-probabilities of one greedy token."""
    chosen: Any = entry.get("logprob")
    if not _is_logprob(chosen):
        return [f"log-probability {chosen}"]
    top = [other.get("logprob") for other in entry.get("top_logprobs") or []]
    bad = [value for value in top if not _is_logprob(value)]
    if bad:
        return [f"log-probability {bad[0]} among the most probable"]
    if top and max(top) > chosen + _ROUNDING:
        return [f"greedy choice at {chosen:.4f} nats, another token at {max(top):.4f}"]
    if math.fsum(math.exp(value) for value in top) > 1 + _ROUNDING:
        return ["probabilities sum to more than one"]
    return []


def _is_logprob(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value) and value <= _ROUNDING
