"""Needles: facts at chosen depths of a long text, asked for at its end."""

from __future__ import annotations

import random
from collections.abc import Sequence

from q38.base.errors import InputError
from q38.measure.behaviour.row import Row, capability, protocol
from q38.measure.behaviour.target import Target

DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)
# Of --answer-tokens, 512 by default; REPORTED: 120 tokens cut a correct answer of the bf16 model short.
_ANSWERS = 2
_PLACES = (
    "harbour",
    "library",
    "station",
    "market",
    "museum",
    "bakery",
    "bridge",
    "school",
    "garden",
    "theatre",
)


def check(target: Target, length: int, *, depths: Sequence[float] = DEPTHS) -> list[Row]:
    """One prompt of about `length` tokens with a note at each depth; every code must be in the answer."""
    depths = sorted(depths)
    target.calibrate()
    notes = make_notes(len(depths), random.Random(target.seed))
    prompt = build(target, length, notes, depths)
    answer = target.ask_text(prompt, stream=True, max_tokens=_ANSWERS * target.answer_tokens)
    hits = [code in answer.visible for code in notes.values()]
    missed = [f"{depth:.0%}" for depth, hit in zip(depths, hits, strict=True) if not hit]
    name, read = f"needles-{length}", answer.prompt_tokens
    faults = []
    if read is None:
        faults.append("the server sends no token counts (usage)")
    elif read < length // 2:
        faults.append(f"the server counts {read} prompt tokens where about {length} were sent")
    told = f"missed at {', '.join(missed)}" if missed else "all found"
    return [
        protocol(f"{name}-read", faults, checked=read or 0, unit="prompt tokens"),
        capability(
            name,
            all(hits),
            judged=target.judged,
            note=f"{told}; finish reason {answer.finish_reason}",
            checked=len(hits),
            unit="needles",
            value=float(sum(hits)),
            limit=float(len(hits)),
        ),
    ]


def require_room(target: Target, lengths: Sequence[int]) -> None:
    """Refuse lengths that the context does not hold, before any request. Raises InputError."""
    answer = _ANSWERS * target.answer_tokens
    if lengths and target.context is not None and max(lengths) + answer > target.context:
        raise InputError(
            f"{max(lengths)} tokens and an answer of {answer} exceed the server's context of {target.context}",
            where="--needles",
            remedy=f"use at most {max(target.context - answer, 0)}",
        )


def make_notes(count: int, order: random.Random) -> dict[str, str]:
    """{place: six digits}, all different."""
    places = order.sample(_PLACES, count)
    codes = order.sample(range(100_000, 1_000_000), count)
    return {place: str(code) for place, code in zip(places, codes, strict=True)}


def build(target: Target, length: int, notes: dict[str, str], depths: Sequence[float]) -> str:
    """Text in many languages with the notes between its sentences, the question last."""
    question = (
        f"In the text above there are {len(notes)} notes, each with the code of a place. "
        f"List every place with its code: {', '.join(notes)}."
    )
    sentences = [f"Note: the code of the {place} is {code}." for place, code in notes.items()]
    frame = "\n\n".join([*sentences, question])
    room = max(length - round(target.estimate(frame)), 1)
    body = target.prompt(room, task=question).removesuffix(question)
    cuts = [_gap(body, round(depth * len(body))) for depth in depths]
    parts, start = [], 0
    for cut, sentence in zip(cuts, sentences, strict=True):
        parts += [body[start:cut].strip(), sentence]
        start = cut
    return "\n\n".join([*parts, body[start:].strip(), question])


def _gap(text: str, position: int) -> int:
    """The next end of a line, or the position itself where none follows."""
    found = text.find("\n", position)
    return position if found < 0 else found
