"""A prompt that the server reads in several prefill steps, each of which reads the KV cache of those before it."""

from __future__ import annotations

import math

from q38.measure.behaviour.row import Row, protocol, unjudged
from q38.measure.behaviour.target import Target

CHUNK = 2048  # where the server does not say: q38 serve's default
_CHUNKS = 3.5
_TOLERANCE = 0.25  # of the prompt's length, which is estimated
_ATTEMPTS = 2  # the first teaches the rates of this tokenizer on the very text


def check(target: Target, *, tokens: int | None = None) -> list[Row]:
    """`tokens`: length of the prompt; default: three and a half chunks, or what the context holds."""
    chunk = target.chunk or CHUNK
    wanted = tokens or math.ceil(_CHUNKS * chunk)
    if target.context is not None:
        wanted = min(wanted, int((target.context - 16) * (1 - _TOLERANCE / 2)))
    if wanted <= chunk and tokens is None:
        why = f"the context of {target.context} tokens holds no two chunks of {chunk}"
        return [unjudged("several-chunks", why)]
    target.calibrate()
    for _ in range(_ATTEMPTS):
        answer = target.ask_text(target.prompt(wanted), stream=True, max_tokens=8)
        read = answer.prompt_tokens
        if read is None or abs(read - wanted) <= _TOLERANCE * wanted:
            break
    faults = []
    if read is None:
        faults.append("the server sends no token counts (usage)")
    elif abs(read - wanted) > _TOLERANCE * wanted:
        faults.append(f"the server counts {read} prompt tokens where about {wanted} were sent")
    if not answer.completion_tokens:
        faults.append("nothing was generated")
    told = f"chunks of {chunk}" if target.chunk else f"chunk size not reported, {chunk} assumed"
    if read is not None and not faults and read <= chunk:
        return [unjudged("several-chunks", f"{read} prompt tokens are one chunk ({told})")]
    return [protocol("several-chunks", faults, note=told, checked=read or 0, unit="prompt tokens")]
