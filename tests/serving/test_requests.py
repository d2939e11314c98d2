"""What the transformers engine accepts and refuses, before a model is asked."""

from __future__ import annotations

from typing import Any

import pytest

from q38.serving.openai_requests import BadRequest, parse_chat, parse_completion

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> Any:
    return parse_chat({"messages": MESSAGES, **fields})


def test_the_newer_token_limit_wins() -> None:
    assert chat(max_tokens=5, max_completion_tokens=7).limit == 7
    assert chat(max_tokens=5).limit == 5
    assert chat().limit is None


def test_developer_means_system() -> None:
    request = parse_chat({"messages": [{"role": "developer", "content": "x"}, *MESSAGES]})
    assert [m["role"] for m in request.template_messages()] == ["system", "user"]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}


def test_tool_turns_reach_the_template_with_arguments_as_an_object() -> None:
    turns = [
        {"role": "assistant", "content": "so", "tool_calls": [call('{"a": 1}')], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    first, second = parse_chat({"messages": turns}).template_messages()
    assert first == {**turns[0], "tool_calls": [call({"a": 1})]}
    assert second == turns[1]


@pytest.mark.parametrize("calls", [[call("{broken")], [{"id": "1"}], "none", [call({}), 3]], ids=str)
def test_tool_calls_without_json_arguments_are_refused(calls: Any) -> None:
    request = parse_chat({"messages": [{"role": "assistant", "tool_calls": calls}]})
    with pytest.raises(BadRequest, match=r"messages\.0\.tool_calls"):
        request.template_messages()


def test_an_answer_that_is_sent_back_whole_is_accepted() -> None:
    turn = {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "audio": None}
    assert parse_chat({"messages": [turn]}).template_messages() == [{"role": "assistant", "content": "yes"}]


def test_content_becomes_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert [m["content"] for m in parse_chat({"messages": turns}).template_messages()] == ["a b", ""]


def test_a_minimum_above_the_limit_is_refused() -> None:
    with pytest.raises(BadRequest, match="min_tokens 5 is above the limit of 4"):
        chat(min_tokens=5, max_completion_tokens=4)


def test_one_stop_string_is_a_list_of_one() -> None:
    assert chat(stop="x").stops == ["x"]
    assert chat(stop=["x", "y"]).stops == ["x", "y"]
    assert chat().stops == []


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1}, {"presence_penalty": 0.0}, {"frequency_penalty": 0}, {"logprobs": False}, {"response_format": {"type": "text"}},
        {"tool_choice": "auto"}, {"user": "me"}, {"metadata": {"a": "b"}}, {"parallel_tool_calls": True}, {"reasoning_effort": "low"},
        {"stream_options": {"include_usage": True}}, {"temperature": None}, {"seed": None}, {"store": False},
    ],
    ids=str,
)  # fmt: skip
def test_what_changes_no_answer_is_accepted(fields: dict[str, Any]) -> None:
    chat(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 3}, "n"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"functions": [{}]}, "functions"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"stop": [1]}, "stop.0"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "no role"}]}, "messages.0.role"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"surprise": 1}, "surprise"),
    ],
    ids=str,
)
def test_a_refusal_names_the_field_and_is_one_sentence(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as refused:
        chat(**fields)
    assert refused.value.param == param
    assert param in refused.value.message
    assert "\n" not in refused.value.message
    assert refused.value.status == 400


def test_a_picture_is_refused_by_its_type() -> None:
    parts = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(BadRequest, match=r"messages\.0 .*image_url.*text only"):
        parse_chat({"messages": [{"role": "user", "content": parts}]})


def test_a_completion_takes_one_string() -> None:
    assert parse_completion({"prompt": "x", "max_tokens": 3}).limit == 3
    with pytest.raises(BadRequest, match="prompt"):
        parse_completion({"prompt": [1, 2]})
    with pytest.raises(BadRequest, match="echo"):
        parse_completion({"prompt": "x", "echo": True})
