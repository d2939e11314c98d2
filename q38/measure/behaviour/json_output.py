"""JSON on request (response_format): once as any object, once by a schema."""

from __future__ import annotations

from typing import Any

from pydantic_core import from_json

from q38.measure.behaviour.answer import Answer
from q38.measure.behaviour.row import Row, capability, protocol
from q38.measure.behaviour.target import Target, optional

_PROMPT = 'Give a JSON object with the fields "city" (the capital of France) and "letters" (how many letters it has).'
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "letters": {"type": "integer"}},
    "required": ["city", "letters"],
    "additionalProperties": False,
}
_FORMATS: dict[str, dict[str, Any]] = {
    "object": {"type": "json_object"},
    "schema": {"type": "json_schema", "json_schema": {"name": "city", "schema": _SCHEMA, "strict": True}},
}


def check(target: Target) -> list[Row]:
    """A server that accepts the format must keep it; an answer cut by the token limit must be the beginning of JSON."""
    faults, cut, right = [], 0, 0
    for name, form in _FORMATS.items():
        with optional("response_format"):
            answer = target.ask(_PROMPT, response_format=form)
        fault = json_fault(answer)
        if fault:
            faults.append(f"{name}: {fault}")
        cut += answer.finish_reason == "length"
        right += not fault and is_right(answer.text)
    note = (
        f"{cut} of {len(_FORMATS)} answers cut by the limit of {target.answer_tokens} tokens" if cut else ""
    )
    return [
        protocol("json-output", faults, note=note, checked=len(_FORMATS)),
        capability(
            "json-content",
            right == len(_FORMATS),
            judged=target.judged,
            note=f"{right} of {len(_FORMATS)} answers have the right content",
            checked=len(_FORMATS),
        ),
    ]


def json_fault(answer: Answer) -> str | None:
    """Why the text is not the JSON object that was asked for, or not the beginning of one."""
    text = answer.text.strip()
    whole = answer.finish_reason != "length"
    if not text:
        return "the answer is empty" if whole else None
    try:
        value = from_json(text, allow_partial=False if whole else "trailing-strings")
    except ValueError as error:
        return f"not JSON ({error}): {text[:60]!r}"
    return None if isinstance(value, dict) else f"not an object: {text[:60]!r}"


def is_right(text: str) -> bool:
    """Whether the object says Paris and five."""
    try:
        value = from_json(text)
    except ValueError:
        return False
    return (
        isinstance(value, dict)
        and str(value.get("city", "")).strip().lower() == "paris"
        and str(value.get("letters", "")) == "5"
    )
