"""The real server with the real model, asked by the `openai` package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from q38.hf.load import load_tokenizer
from q38.serving.launch import Server

TURNS = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is a list?"},
    {"role": "assistant", "content": "An ordered collection."},
    {"role": "user", "content": "And a set?"},
]
MODEL = "tiny"
LIMIT = 12  # tokens of the answers that are compared


@pytest.fixture(scope="module")
def client(tiny_server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tiny_server.url}/v1", api_key="none", max_retries=0, timeout=120
    ) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(tiny_source: Any) -> Any:
    return load_tokenizer(tiny_source)


@pytest.fixture(scope="module")
def eos(tokenizer: Any) -> int:
    return int(tokenizer.eos_token_id)


@pytest.fixture(scope="module")
def greedy(client: openai.OpenAI) -> str:
    """LIMIT greedy tokens, as text."""
    reply = ask(client, max_tokens=LIMIT)
    return reply.choices[0].message.content or ""


def ask(client: openai.OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": TURNS, "temperature": 0, **options})


def stream(client: openai.OpenAI, **options: Any) -> list[Any]:
    return list(ask(client, stream=True, **options))


def text_of(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def finish_of(chunks: list[Any]) -> str:
    return next(c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason)


def test_a_conversation_with_a_system_message_is_answered(client: openai.OpenAI, tokenizer: Any) -> None:
    reply = ask(client, max_tokens=8)
    prompt = tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content
    assert reply.usage.prompt_tokens == len(prompt)
    assert reply.usage.completion_tokens == 8
    assert reply.usage.total_tokens == len(prompt) + 8
    assert reply.choices[0].finish_reason == "length"
    assert reply.model == MODEL


def test_streaming_gives_the_same_text_and_counts(client: openai.OpenAI, greedy: str) -> None:
    chunks = stream(client, max_tokens=LIMIT, stream_options={"include_usage": True})
    assert text_of(chunks) == greedy
    assert chunks[0].choices[0].delta.role == "assistant"
    assert finish_of(chunks) == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == LIMIT
    assert all(c.usage is None for c in chunks[:-1])


def test_no_usage_is_streamed_unless_asked_for(client: openai.OpenAI) -> None:
    assert all(c.usage is None for c in stream(client, max_tokens=2))


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("as_list", [False, True], ids=["string", "list"])
def test_a_stop_string_ends_the_text_before_itself(
    client: openai.OpenAI, greedy: str, streamed: bool, as_list: bool
) -> None:
    stop = greedy[len(greedy) // 2 :][:3]
    expected = greedy[: greedy.index(stop)]
    options: dict[str, Any] = {"max_tokens": LIMIT, "stop": [stop, "never in the text"] if as_list else stop}
    if streamed:
        chunks = stream(client, **options)
        assert (text_of(chunks), finish_of(chunks)) == (expected, "stop")
    else:
        choice = ask(client, **options).choices[0]
        assert (choice.message.content, choice.finish_reason) == (expected, "stop")


def test_a_stop_string_that_never_comes_changes_nothing(client: openai.OpenAI, greedy: str) -> None:
    chunks = stream(client, max_tokens=LIMIT, stop=[greedy[-2:] + "!!", "\u2603"])
    assert (text_of(chunks), finish_of(chunks)) == (greedy, "length")


@pytest.mark.parametrize("limit", [1, 5])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_the_end_token_is_a_stop_even_as_the_last_one_allowed(
    client: openai.OpenAI, eos: int, limit: int, streamed: bool
) -> None:
    options: dict[str, Any] = {"max_tokens": limit, "logit_bias": {str(eos): 100}}
    if streamed:
        chunks = stream(client, stream_options={"include_usage": True}, **options)
        seen = (text_of(chunks), finish_of(chunks), chunks[-1].usage.completion_tokens)
    else:
        reply = ask(client, **options)
        seen = (
            reply.choices[0].message.content,
            reply.choices[0].finish_reason,
            reply.usage.completion_tokens,
        )
    assert seen == ("", "stop", 1)


def test_ignore_eos_generates_to_the_limit(client: openai.OpenAI, eos: int) -> None:
    reply = ask(client, max_tokens=6, logit_bias={str(eos): 100}, extra_body={"ignore_eos": True})
    assert (reply.usage.completion_tokens, reply.choices[0].finish_reason) == (6, "length")


def test_the_newer_name_of_the_token_limit_works(client: openai.OpenAI) -> None:
    assert ask(client, max_completion_tokens=3).usage.completion_tokens == 3


def test_a_seed_makes_sampling_repeatable(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        return str(ask(client, max_tokens=8, temperature=1.5, seed=seed).choices[0].message.content)

    first = sample(1)
    assert sample(1) == first
    assert sample(2) != first


def test_text_parts_are_the_same_as_a_string(client: openai.OpenAI) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "What is a list?"}]}]
    text = [{"role": "user", "content": "What is a list?"}]
    first, second = (ask(client, messages=m, max_tokens=4) for m in (parts, text))
    assert first.usage == second.usage
    assert first.choices[0].message.content == second.choices[0].message.content


def test_several_requests_at_once_are_all_answered(client: openai.OpenAI, greedy: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda _: text_of(stream(client, max_tokens=LIMIT)), range(3)))
    assert replies == [greedy] * 3


def test_a_client_that_leaves_stops_its_generation(client: openai.OpenAI) -> None:
    chunks = ask(client, max_tokens=30_000, stream=True, extra_body={"ignore_eos": True})
    next(iter(chunks))
    chunks.close()
    # One request at a time: this one waits for ever behind 30,000 tokens if they go on.
    assert ask(client, max_tokens=2).usage.completion_tokens == 2


def test_the_served_model_is_listed(client: openai.OpenAI) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == [MODEL]
    assert models[0].model_dump()["max_model_len"] > 0


def test_text_completion_works(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt="def f(", max_tokens=6, temperature=0)
    chunks = client.completions.create(model=MODEL, prompt="def f(", max_tokens=6, temperature=0, stream=True)
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 6


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"temperature": 3}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000_000}, "context"),
        ({"stop": [""]}, "stop"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}, {"role": "poet", "content": "x"}]}, "role"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "late"}]}, "first"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "text only",
        ),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
    ids=lambda v: None if isinstance(v, dict) else v,
)
def test_a_request_that_cannot_be_honoured_is_refused_with_the_reason(
    client: openai.OpenAI, options: dict[str, Any], word: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **options)
    assert word in refused.value.body["message"]  # type: ignore[index]
    assert refused.value.body["type"] == "invalid_request_error"  # type: ignore[index]


def test_a_prompt_longer_than_the_context_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="context"):
        ask(client, messages=[{"role": "user", "content": "x1 " * 40_000}], max_tokens=1)


def test_another_models_name_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="tiny"):
        ask(client, model="gpt-4o")


def test_a_body_that_is_not_json_is_refused_in_json(tiny_server: Server) -> None:
    reply = httpx.post(
        f"{tiny_server.url}/v1/chat/completions",
        content="{broken",
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 400
    assert "JSON" in reply.json()["error"]["message"]


def test_a_missing_field_is_named(tiny_server: Server) -> None:
    reply = httpx.post(f"{tiny_server.url}/v1/chat/completions", json={"model": MODEL})
    assert reply.status_code == 400
    assert "messages" in reply.json()["error"]["message"]


def test_the_stream_ends_with_done(tiny_server: Server) -> None:
    body = {"messages": TURNS, "max_tokens": 2, "stream": True}
    lines = (
        httpx.post(f"{tiny_server.url}/v1/chat/completions", json=body, timeout=60).text.strip().splitlines()
    )
    assert lines[-1] == "data: [DONE]"
    assert all(json.loads(line.removeprefix("data: "))["object"] for line in lines[:-1] if line)


@pytest.mark.parametrize("path", ["/reset", "/load_model", "/v1/responses", "/docs"])
def test_routes_that_would_load_or_unload_models_are_not_there(tiny_server: Server, path: str) -> None:
    reply = httpx.post(f"{tiny_server.url}{path}", json={"model": "other/model"})
    assert reply.status_code == 404
    assert reply.json()["error"]["code"] == 404
