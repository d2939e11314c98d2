"""Stop strings end an answer and are never part of it, also where one is spread over several pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from q38.measure.behaviour.row import Row, protocol, unjudged
from q38.measure.behaviour.target import Target

_PROMPT = "Write three sentences about a lighthouse."
_TOKENS = 32
_LENGTH = 4  # characters of a stop string
_STOPS = 2


def check(target: Target) -> list[Row]:
    """Stop strings are taken from an answer of the model itself, in the middle of a piece and across two.

    A model that reasons may have nothing but reasoning to show within the limit; then that is looked at.
    """
    plain = target.ask(_PROMPT, stream=True, max_tokens=_TOKENS)
    part = "reasoning" if len(plain.reasoning) > len(plain.text) else "text"
    pieces = [getattr(piece, part) for piece in plain.pieces]
    searched = None
    if target.native:
        # SGLang looks for stop strings in the text with its special tokens, and shows it without them: one that
        # an untrained model puts into the middle of a stop string hides it.
        searched = target.ask(_PROMPT, max_tokens=_TOKENS, skip_special_tokens=False).visible
    stops = choose_stops(pieces, searched)
    if not stops:
        return [unjudged("stop-strings", f"the answer is too short to stop in: {plain.visible[:40]!r}")]
    faults, reached = [], 0
    for stop in stops:
        for stream in (True, False):
            answer = target.ask(_PROMPT, stream=stream, max_tokens=_TOKENS, stop=[stop])
            how = "streamed" if stream else "whole"
            found = stop_faults(getattr(answer, part), answer.finish_reason, stop, "".join(pieces))
            faults += [f"{how}, stop {stop!r}: {fault}" for fault in found]
            reached += answer.finish_reason == "stop"
    asked = 2 * len(stops)
    if not faults and not reached:
        return [unjudged("stop-strings", "the answers changed between requests: no stop string came up")]
    note = f"{reached} of {asked} answers ended at their stop string"
    return [protocol("stop-strings", faults, note=note, checked=asked)]


def choose_stops(pieces: Sequence[str], searched: str | None = None) -> list[str]:
    """A stop string inside the text and one across the border of two pieces, each first seen past the beginning.

    Args:
        searched: the text in which the server looks for them, where that is another.
    """
    text = "".join(pieces)
    borders = [end for end in accumulate(len(piece) for piece in pieces if piece) if end < len(text)]
    starts = [len(text) // 2, *(end - _LENGTH // 2 for end in borders if end > len(text) // 4)]
    found: list[str] = []
    for start in (max(start, 1) for start in starts):
        stop = text[start : start + _LENGTH]
        # One that comes earlier too would end the answer there; one that is blank ends many answers.
        usable = len(stop) == _LENGTH and stop.strip() and "\ufffd" not in stop and text.find(stop) == start
        if usable and (searched is None or stop in searched) and stop not in found:
            found.append(stop)
        if len(found) == _STOPS:
            break
    return found


def stop_faults(text: str, finish: str, stop: str, plain: str) -> list[str]:
    """What is wrong with an answer that should end before `stop`; `plain`: the answer without it."""
    faults, expected = [], plain[: plain.find(stop)]
    if stop in text:
        faults.append("the stop string is in the text")
    elif plain.startswith(text) and len(text) > len(expected):
        faults.append(f"the text goes on into the stop string: it ends with {text[-8:]!r}")
    if text == expected and finish != "stop":
        faults.append(f"the answer ended at the stop string with finish reason '{finish}'")
    return faults
