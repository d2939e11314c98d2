"""A prompt of one token, and an answer of one token: the smallest shapes, which kernels get wrong first."""

from __future__ import annotations

from q38.measure.behaviour.row import Row, protocol
from q38.measure.behaviour.target import Target
from q38.serving.client import ServerError

_MISSING = (404, 405)


def check(target: Target) -> list[Row]:
    """By the text completion API, which has no template; by the shortest chat where that API is absent."""
    try:
        answer = target.complete("a", max_tokens=1)
        how = "text completion"
    except ServerError as error:
        if error.status not in _MISSING:
            raise
        answer, how = target.ask("a", max_tokens=1), "chat: no text completion API"
    faults = []
    if answer.prompt_tokens is None or answer.completion_tokens is None:
        faults.append("the server sends no token counts (usage)")
    elif answer.completion_tokens != 1:
        faults.append(f"one token was asked for, {answer.completion_tokens} were counted")
    if answer.finish_reason not in ("length", "stop"):
        faults.append(f"finish reason '{answer.finish_reason}'")
    tokens = answer.prompt_tokens
    return [protocol("one-token", faults, note=how, checked=tokens or 0, unit="prompt tokens")]
