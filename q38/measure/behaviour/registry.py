"""The behaviours by name, in the order in which they run: cheap ones first, so that a broken server shows early."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from q38.base.errors import InputError
from q38.measure.behaviour import (
    cancelled_stream,
    context_limit,
    decode_prefill,
    finite_logprobs,
    held_out,
    json_output,
    one_token,
    prefix_hit,
    repetition,
    scripts,
    several_chunks,
    stop_strings,
    tool_conversation,
)
from q38.measure.behaviour.needles import DEPTHS
from q38.measure.behaviour.needles import check as check_needles
from q38.measure.behaviour.row import Row
from q38.measure.behaviour.target import Target


@dataclass(frozen=True)
class Behaviour:
    """One behaviour. `check` sends its requests and gives its rows."""

    name: str
    check: Callable[[Target], list[Row]]


@dataclass(frozen=True)
class Options:
    """What single behaviours take.

    long_prompt: tokens of `several-chunks`; default: by the server's chunk.
    needles: lengths in tokens; none: no needles. depths: shares of the text before each note.
    text, tokens: source (q38.model.text) and length of the held-out text. max_nll: nats above which `nll` fails.
    """

    long_prompt: int | None = None
    needles: Sequence[int] = ()
    depths: Sequence[float] = DEPTHS
    text: str = "multilingual"
    tokens: int = 4096
    max_nll: float | None = None
    only: Sequence[str] = field(default=())
    skip: Sequence[str] = field(default=())


NEEDLES = "needles"
_PLAIN: dict[str, Callable[[Target], list[Row]]] = {
    "one-token": one_token.check,
    "finite-logprobs": finite_logprobs.check,
    "decode-prefill": decode_prefill.check,
    "stop-strings": stop_strings.check,
    "json-output": json_output.check,
    "scripts": scripts.check,
    "cancelled-stream": cancelled_stream.check,
    "tool-conversation": tool_conversation.check,
    "prefix-hit": prefix_hit.check,
    "repetition": repetition.check,
}
NAMES = (*_PLAIN, "several-chunks", "context-limit", "nll", NEEDLES)


def choose(options: Options) -> list[Behaviour]:
    """The behaviours to run.

    Raises:
        InputError: an unknown name, nothing left, or depths that are no shares.
    """
    _refuse(options)
    checks: dict[str, Callable[[Target], list[Row]]] = {
        **_PLAIN,
        "several-chunks": partial(several_chunks.check, tokens=options.long_prompt),
        "context-limit": context_limit.check,
        "nll": partial(held_out.check, source=options.text, tokens=options.tokens, max_nll=options.max_nll),
        **{
            f"{NEEDLES}-{length}": partial(check_needles, length=length, depths=options.depths)
            for length in options.needles
        },
    }
    chosen = [
        Behaviour(name, check)
        for name, check in checks.items()
        if (not options.only or _is_named(name, options.only)) and not _is_named(name, options.skip)
    ]
    if not chosen:
        raise InputError("no check is left", where="--only, --skip", remedy="leave one of them out")
    return chosen


def _is_named(name: str, names: Sequence[str]) -> bool:
    return name in names or (name.startswith(f"{NEEDLES}-") and NEEDLES in names)


def _refuse(options: Options) -> None:
    for option, names in (("--only", options.only), ("--skip", options.skip)):
        unknown = next((name for name in names if name not in NAMES), None)
        if unknown is not None:
            raise InputError(f"unknown check '{unknown}'", where=option, remedy=f"known: {', '.join(NAMES)}")
    if NEEDLES in options.only and not options.needles:
        raise InputError("no lengths are given", where="--needles", remedy="write --needles 2k,8k")
    if any(length < 1 for length in options.needles):
        raise InputError("lengths are positive numbers of tokens", where="--needles", remedy="write 2k,8k")
    most = len(DEPTHS) * 2
    if not 0 < len(options.depths) <= most or not all(0 <= depth <= 1 for depth in options.depths):
        raise InputError(
            f"depths are 1 to {most} shares of the text", where="--depths", remedy="write 0.1,0.5,0.9"
        )
    if options.long_prompt is not None and options.long_prompt < 1:
        raise InputError("a prompt has a positive number of tokens", where="--long-prompt", remedy="write 8k")
    if options.max_nll is not None and not options.max_nll > 0:
        raise InputError(
            f"{options.max_nll} is not positive", where="--max-nll", remedy="give nats, for example 2.0"
        )
