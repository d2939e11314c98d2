"""Endless repetition: a model whose answer ends as one phrase again and again until the limit."""

from __future__ import annotations

from q38.measure.behaviour.row import Row, capability
from q38.measure.behaviour.target import Target

_PROMPTS = (
    "Explain why the sky is blue, for a curious child.",
    "写一个关于渔夫和大海的短故事。",
    "Write a Python function that merges two sorted lists, and explain it.",
)
_LEAST = 160  # characters that the repeated part covers at least
_TIMES = 5
_LONGEST = 200  # characters of the phrase


def check(target: Target) -> list[Row]:
    """Greedy answers to three open questions. An answer that ends by itself does not repeat for ever."""
    found = []
    for prompt in _PROMPTS:
        answer = target.ask(prompt)
        loop = repeated_tail(answer.visible) if answer.finish_reason == "length" else None
        if loop:
            phrase, times = loop
            found.append(f"{phrase[:40]!r} {times} times at the end of the answer to {prompt[:30]!r}")
    note = "; ".join(found) or "none"
    checked = len(_PROMPTS)
    return [capability("repetition", not found, judged=target.judged, note=note, checked=checked)]


def repeated_tail(text: str) -> tuple[str, int] | None:
    """(phrase, times) if the text ends in a phrase that is repeated at least 5 times over 160 characters.

    The shortest period of a suffix, by the Z-function of the reversed text (Gusfield, Algorithms on Strings,
    Trees and Sequences, section 1.3).
    """
    turned = text.rstrip()[::-1]
    z = _z_function(turned)
    for period in range(1, min(_LONGEST, len(turned) // _TIMES) + 1):
        covered = z[period] + period  # length of the suffix that has this period
        if covered >= max(_LEAST, _TIMES * period):
            return turned[:period][::-1], covered // period
    return None


def _z_function(text: str) -> list[int]:
    """z[i]: length of the longest common prefix of text and text[i:]."""
    z = [0] * (len(text) + 1)
    left = right = 0
    for i in range(1, len(text)):
        if i < right:
            z[i] = min(right - i, z[i - left])
        while i + z[i] < len(text) and text[z[i]] == text[i + z[i]]:
            z[i] += 1
        if i + z[i] > right:
            left, right = i, i + z[i]
    return z
