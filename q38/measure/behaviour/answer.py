"""One answer of a chat or completion API, whole or streamed, in one form."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from q38.serving.client import ServerError

FINISHES = frozenset({"stop", "length", "tool_calls", "content_filter", "function_call"})


@dataclass(frozen=True)
class Piece:
    """What one event of a stream carried. `at`: seconds since the request was sent; 0 for a whole answer."""

    at: float
    text: str = ""
    reasoning: str = ""


@dataclass
class Call:
    """A tool call. `arguments` is JSON text."""

    id: str = ""
    name: str = ""
    arguments: str = ""

    def parsed(self) -> dict[str, Any] | None:
        """The arguments as an object; None if they are not one."""
        try:
            value = json.loads(self.arguments or "{}")
        except ValueError:
            return None
        return value if isinstance(value, dict) else None

    def to_message(self) -> dict[str, Any]:
        """As an assistant message carries it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass
class Answer:
    """An answer. `usage` and `logprobs` are as the server sent them; empty where it sent none.

    logprobs: one {"token", "logprob", "top_logprobs"} per token.
    """

    finish_reason: str = ""
    pieces: list[Piece] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)

    @property
    def reasoning(self) -> str:
        return "".join(piece.reasoning for piece in self.pieces)

    @property
    def visible(self) -> str:
        """Reasoning and text in the order in which they came."""
        return "".join(piece.reasoning + piece.text for piece in self.pieces)

    @property
    def prompt_tokens(self) -> int | None:
        return _count(self.usage.get("prompt_tokens"))

    @property
    def completion_tokens(self) -> int | None:
        return _count(self.usage.get("completion_tokens"))

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from the prefix cache; None where the server does not report them."""
        details = self.usage.get("prompt_tokens_details")
        return _count(details.get("cached_tokens")) if isinstance(details, dict) else None

    @property
    def first_at(self) -> float | None:
        """Seconds to the first piece that showed something."""
        return next((piece.at for piece in self.pieces if piece.text or piece.reasoning), None)


def read_whole(document: Mapping[str, Any], where: str) -> Answer:
    """The answer in a chat completion or a text completion.

    Raises:
        ServerError: it is neither.
    """
    answer = Answer()
    try:
        choice = document["choices"][0]
        answer.finish_reason = choice.get("finish_reason") or ""
        answer.usage = document.get("usage") or {}
        _add(answer, choice, choice.get("message") or {}, 0.0)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ServerError(f"not a completion: {_clip(document)}", where=where) from None
    return answer


def read_stream(events: Iterable[tuple[float, Mapping[str, Any]]], where: str) -> Answer:
    """The answer that a stream adds up to.

    Raises:
        ServerError: an event is no chunk, reports an error, or the stream ends without a finish reason.
    """
    answer = Answer()
    for at, chunk in events:
        add_event(answer, chunk, at, where)
    if not answer.finish_reason:
        raise ServerError("the answer broke off without a finish reason", where=where)
    return answer


def add_event(answer: Answer, chunk: Mapping[str, Any], at: float, where: str) -> None:
    """Add one event of a stream. Raises ServerError."""
    if "error" in chunk:
        raise ServerError(f"the server reports: {_clip(chunk['error'])}", where=where)
    try:
        answer.usage = chunk.get("usage") or answer.usage
        if not chunk["choices"]:
            return
        choice = chunk["choices"][0]
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        _add(answer, choice, choice.get("delta") or {}, at)
    except (KeyError, TypeError, AttributeError, IndexError):
        raise ServerError(f"not a completion chunk: {_clip(chunk)}", where=where) from None


def _add(answer: Answer, choice: Mapping[str, Any], message: Mapping[str, Any], at: float) -> None:
    # Two names in use for the reasoning; `text` is the completion API's.
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    text = message.get("content") or choice.get("text") or ""
    if text or reasoning:
        answer.pieces.append(Piece(at, text + "", reasoning + ""))
    for position, part in enumerate(message.get("tool_calls") or []):
        index = part.get("index", position)
        while len(answer.calls) <= index:
            answer.calls.append(Call())
        call, function = answer.calls[index], part.get("function") or {}
        call.id = call.id or part.get("id") or ""
        call.name = call.name or function.get("name") or ""
        call.arguments += function.get("arguments") or ""
    logprobs = choice.get("logprobs") or {}
    answer.logprobs += logprobs.get("content") or []


def common_length(one: str, other: str) -> int:
    """Characters with which both begin."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _clip(value: Any, most: int = 200) -> str:
    text = " ".join((value if isinstance(value, str) else json.dumps(value)).split())
    return text if len(text) <= most else text[:most] + "..."
