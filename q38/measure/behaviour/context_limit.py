"""One token over the context limit: refused with a 4xx that says so, and the server goes on."""

from __future__ import annotations

import re
from dataclasses import dataclass

from q38.measure.behaviour.row import Row, protocol, unjudged
from q38.measure.behaviour.target import Target
from q38.serving.client import ServerError

_UNIT = " a"  # one token in byte-level BPE; measured all the same
_PROBES = (40, 140)
_TELLING = re.compile(r"context|length|long|maximum|exceed|token", re.IGNORECASE)


@dataclass(frozen=True)
class Ruler:
    """A chat prompt of n units has `overhead + n * rate` tokens."""

    overhead: float
    rate: float

    def units(self, tokens: int) -> int:
        """The fewest units that reach `tokens`."""
        return max(1, -int(-(tokens - self.overhead) // self.rate))


def check(target: Target) -> list[Row]:
    """A prompt that fills the context, and one token of answer beyond it."""
    limit = target.context
    if limit is None:
        return [unjudged("context-limit", "the server does not say its context; give --context")]
    ruler = measure(target)
    if ruler is None:
        return [unjudged("context-limit", "the server sends no token counts (usage)")]
    units = ruler.units(limit)
    sent = round(ruler.overhead + units * ruler.rate)
    faults, note = [], f"a prompt of {sent} tokens at a limit of {limit}"
    try:
        answer = target.ask(_UNIT * units, max_tokens=1)
    except ServerError as error:
        if error.status is None or not 400 <= error.status < 500:
            faults.append(f"{note} is no clear refusal: {error.what}")
        elif not _TELLING.search(error.what):
            faults.append(f"{note} is refused without the reason: {error.what}")
        else:
            note += f": {error.what}"
    else:
        faults.append(f"{note} was accepted ({answer.prompt_tokens} tokens counted)")
    try:
        target.require_alive()
    except ServerError as error:
        faults.append(f"after {note} the server does not answer: {error.what}")
    return [protocol("context-limit", faults, note=note, checked=sent, unit="prompt tokens")]


def measure(target: Target) -> Ruler | None:
    """From two short prompts, by the server's own counts."""
    low, high = (target.ask(_UNIT * n, max_tokens=1).prompt_tokens for n in _PROBES)
    if low is None or high is None or high <= low:
        return None
    rate = (high - low) / (_PROBES[1] - _PROBES[0])
    return Ruler(low - rate * _PROBES[0], rate)
