"""The same prompt twice: does the second come from the prefix cache?"""

from __future__ import annotations

from q38.measure.behaviour.answer import Answer
from q38.measure.behaviour.row import Row, protocol, unjudged
from q38.measure.behaviour.target import Target

_TOKENS = 1024  # more than any block size in use, so that a hit is possible at all


def check(target: Target) -> list[Row]:
    """Judged by the server's own count of cached tokens. Time alone proves nothing and is only noted."""
    tokens = _TOKENS if target.context is None else min(_TOKENS, target.context // 2)
    target.calibrate()
    prompt = target.prompt(tokens)
    first, second = (target.ask(prompt, stream=True, max_tokens=2) for _ in range(2))
    times = f"first token after {_seconds(first)}, then {_seconds(second)}"
    if target.settings.get("disable_radix_cache"):
        return [unjudged("prefix-hit", f"the server's prefix cache is off; {times}")]
    cached = second.cached_tokens
    if cached is None:
        return [unjudged("prefix-hit", f"cached tokens are not reported; {times}")]
    faults = []
    if cached == 0:
        faults.append(f"none of {second.prompt_tokens} repeated tokens came from the cache; {times}")
    if second.prompt_tokens is not None and cached > second.prompt_tokens:
        faults.append(f"{cached} cached tokens of {second.prompt_tokens}")
    return [
        protocol(
            "prefix-hit",
            faults,
            note=times,
            checked=second.prompt_tokens or 0,
            unit="prompt tokens",
            value=float(cached),
        )
    ]


def _seconds(answer: Answer) -> str:
    return "-" if answer.first_at is None else f"{answer.first_at:.2f} s"
