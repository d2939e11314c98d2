"""A client that leaves in the middle of an answer: the server goes on, and answers the same as before."""

from __future__ import annotations

from typing import Any

from q38.measure.behaviour.answer import Answer, common_length
from q38.measure.behaviour.row import Row, Unsupported, protocol
from q38.measure.behaviour.target import CHAT, Target, optional

_PROMPT = "Describe how bread is made, step by step."
_TOKENS = 32
NEAR_TIE = 0.1  # nats between the two best tokens; REPORTED: same weights and flags part at such places
_LONG = 4096
_SAME = 0.5  # without log-probabilities: this share of the answer must be equal


def check(target: Target) -> list[Row]:
    """Ask, leave a long answer after its first piece, ask again."""
    try:
        with optional("logprobs"):
            before, logprobs = _ask(target, logprobs=True), True
    except Unsupported:
        before, logprobs = _ask(target), False
    tokens = _LONG if target.context is None else max(1, min(_LONG, target.context // 2))
    leave(target, tokens)
    after = _ask(target, logprobs=True) if logprobs else _ask(target)
    fault, note = compare(before, after)
    faults = [fault] if fault else []
    return [protocol("cancelled-stream", faults, note=note, checked=2)]


def leave(target: Target, tokens: int) -> None:
    """Begin a streamed answer of up to `tokens` tokens and close the connection after its first event."""
    body = target.chat_body("Tell a very long story.", max_tokens=tokens) | {"stream": True}
    events = target.client.events(CHAT, body)
    try:
        for _, chunk in events:
            delta = (chunk.get("choices") or [{}])[0].get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"):
                return
    finally:
        events.close()


def compare(before: Answer, after: Answer) -> tuple[str | None, str]:
    """(fault or None, note). Equal, or apart from a near tie on, or half equal where nothing tells of ties."""
    one, other = before.visible, after.visible
    if one == other:
        return None, "the same answer again"
    if before.logprobs and after.logprobs:
        position = next(
            (
                i
                for i, (a, b) in enumerate(zip(before.logprobs, after.logprobs, strict=False))
                if a.get("token") != b.get("token")
            ),
            min(len(before.logprobs), len(after.logprobs)) - 1,
        )
        gap = abs(float(before.logprobs[position]["logprob"]) - float(after.logprobs[position]["logprob"]))
        if gap <= NEAR_TIE:
            return None, f"another answer from token {position} on, at a near tie ({gap:.3f} nats)"
        return f"another answer from token {position} on, {gap:.3f} nats apart (a near tie is {NEAR_TIE})", ""
    share = common_length(one, other) / max(len(one), len(other))
    told = f"the first {share:.0%} of the answer are the same (limit {_SAME:.0%}, no log-probabilities)"
    return (None, told) if share >= _SAME else (told, "")


def _ask(target: Target, **options: Any) -> Answer:
    return target.ask(_PROMPT, max_tokens=_TOKENS, **options)
