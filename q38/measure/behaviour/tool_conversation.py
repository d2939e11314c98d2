"""Three turns with a tool: the question, the tool's result, a question about it; reasoning goes back and forth."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from q38.measure.behaviour.answer import FINISHES, Answer, Call
from q38.measure.behaviour.row import Row, capability, protocol
from q38.measure.behaviour.target import Target

TOOL = "get_weather"
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": "Current weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "description": "Name of the city."}},
                "required": ["city"],
            },
        },
    }
]
_SYSTEM = "You answer questions about the weather. Ask the tool for the weather; never guess it."
_RESULT = '{"city": "Lisbon", "temperature_c": 17, "sky": "heavy rain"}'


def check(target: Target) -> list[Row]:
    """The second turn is streamed. A model that calls no tool gets a scripted call, so the API is tested all the same."""
    turns: list[dict[str, Any]] = [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": "What is the weather in Lisbon right now?"},
    ]
    first = target.ask(turns, tools=TOOLS)
    called = first.finish_reason == "tool_calls" and bool(first.calls) and not answer_faults(first)
    calls = first.calls if called else [Call("call_0", TOOL, '{"city": "Lisbon"}')]
    turns.append(_assistant(first, calls))
    turns += [{"role": "tool", "tool_call_id": call.id, "content": _RESULT} for call in calls]
    second = target.ask(turns, stream=True, tools=TOOLS)
    turns.append(_assistant(second, []))
    turns.append({"role": "user", "content": "Do I need an umbrella? How many degrees was it?"})
    third = target.ask(turns, tools=TOOLS)
    answers = [first, second, third]
    faults = [f"turn {i}: {fault}" for i, answer in enumerate(answers, 1) for fault in answer_faults(answer)]
    faults += growth_faults(answers)
    hits = [answer.cached_tokens for answer in answers]
    cached = "cached tokens not reported" if hits[-1] is None else f"cached tokens {hits}"
    asked = called and any("lisbon" in (c.arguments or "").lower() and c.name == TOOL for c in calls)
    used = "17" in second.text or "17" in third.text
    reasoned = sum(bool(answer.reasoning) for answer in answers)
    return [
        protocol("tool-conversation", faults, note=cached, checked=3, unit="turns"),
        capability(
            "tool-call",
            asked,
            judged=target.judged,
            note=f"{TOOL} was called for Lisbon" if asked else f"no call of {TOOL} for Lisbon",
        ),
        capability(
            "tool-result",
            used,
            judged=target.judged,
            note=f"the tool's 17 degrees are {'' if used else 'not '}in the answers",
        ),
        capability(
            "reasoning",
            reasoned > 0,
            judged=target.judged,
            note=f"in {reasoned} of 3 answers, apart from the text",
        ),
    ]


def answer_faults(answer: Answer) -> list[str]:
    """What is wrong with an answer's structure, whatever the model said."""
    faults = []
    if answer.finish_reason not in FINISHES:
        faults.append(f"finish reason '{answer.finish_reason}'")
    if answer.finish_reason == "tool_calls":
        if not answer.calls:
            faults.append("finish reason tool_calls without a call")
        for call in answer.calls:
            if not call.name or not call.id:
                faults.append(f"a tool call without a {'name' if not call.name else 'id'}")
            elif call.parsed() is None:
                faults.append(f"the arguments of {call.name} are no JSON object: {call.arguments[:60]}")
        if len({call.id for call in answer.calls}) != len(answer.calls):
            faults.append("two tool calls have one id")
    if answer.prompt_tokens is None:
        faults.append("no token counts (usage)")
    return faults


def growth_faults(answers: list[Answer]) -> list[str]:
    """Each turn's prompt holds the one before it, so it must be longer."""
    counts = [answer.prompt_tokens for answer in answers]
    known = [count for count in counts if count is not None]
    if len(known) == len(counts) and any(b <= a for a, b in pairwise(known)):
        return [f"prompts do not grow from turn to turn: {known} tokens"]
    return []


def _assistant(answer: Answer, calls: list[Call]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if calls:
        message["tool_calls"] = [call.to_message() for call in calls]
    return message
