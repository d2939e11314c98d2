from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.measure.behaviour.answer import Answer, Call, read_stream, read_whole
from q38.serving.client import ServerError


def chunk(finish: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}], "usage": usage}


def stream(*chunks: dict[str, Any]) -> Answer:
    return read_stream([(float(i), c) for i, c in enumerate(chunks)], "here")


def test_a_stream_adds_up_to_an_answer() -> None:
    answer = stream(
        chunk(role="assistant"),
        chunk(reasoning_content="hm, "),
        chunk(content="a"),
        chunk(content="b"),
        chunk(finish="stop"),
        {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}},
    )  # fmt: skip
    assert (answer.reasoning, answer.text, answer.visible) == ("hm, ", "ab", "hm, ab")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (7, 3, 4)
    assert (answer.finish_reason, answer.first_at) == ("stop", 1.0)


@given(st.text(min_size=1), st.data())
def test_a_tool_call_does_not_depend_on_how_it_is_cut(city: str, data: st.DataObject) -> None:
    arguments = json.dumps({"city": city})
    cuts = sorted(data.draw(st.sets(st.integers(1, len(arguments) - 1), max_size=4)))
    parts = [arguments[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    head = [{"index": 0, "id": "c1", "function": {"name": "f", "arguments": parts[0]}}]
    rest = [chunk(tool_calls=[{"index": 0, "function": {"arguments": part}}]) for part in parts[1:]]
    answer = stream(chunk(tool_calls=head), *rest, chunk(finish="tool_calls"))
    assert answer.calls == [Call("c1", "f", arguments)]
    assert answer.calls[0].parsed() == {"city": city}


def test_a_whole_answer_reads_like_its_stream() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    message = {"role": "assistant", "content": "ab", "reasoning_content": "hm"}
    whole = read_whole({"choices": [{"message": message, "finish_reason": "stop"}], "usage": usage}, "here")
    streamed = stream(chunk(reasoning_content="hm"), chunk(content="ab"), chunk(finish="stop", usage=usage))
    assert (whole.text, whole.reasoning, whole.usage) == (streamed.text, streamed.reasoning, streamed.usage)


def test_a_text_completion_is_an_answer() -> None:
    assert read_whole({"choices": [{"text": "ab", "finish_reason": "length"}]}, "here").text == "ab"


@pytest.mark.parametrize("document", [{}, {"choices": []}, {"choices": 5}, {"choices": [5]}])
def test_another_document_is_no_answer(document: dict[str, Any]) -> None:
    with pytest.raises(ServerError, match="not a completion"):
        read_whole(document, "here")


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ([chunk(content="a")], "broke off"),
        ([{"choices": 5}], "not a completion chunk"),
        ([chunk(content="a"), {"error": {"message": "out of memory"}}], "out of memory"),
        ([chunk(content=5)], "not a completion chunk"),
    ],
)
def test_a_broken_stream_is_named(chunks: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(ServerError, match=words):
        stream(*chunks)


@pytest.mark.parametrize("value", [None, -1, True, "7", 1.5])
def test_a_count_that_is_none_is_not_reported(value: Any) -> None:
    usage = {"prompt_tokens": value, "prompt_tokens_details": {"cached_tokens": value}}
    answer = Answer(usage=usage)
    assert answer.prompt_tokens is None and answer.cached_tokens is None
