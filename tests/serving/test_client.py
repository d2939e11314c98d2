"""The HTTP client: what it reads, what it times, and what it says when the server misbehaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from q38.base.errors import InputError, Q38Error, ResourceError
from q38.serving.client import Client, ServerError
from tests.serving.fake_server import DROP, FakeServer, Step, answer, chunk, event, fake_server


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        yield fake


def ask(server: FakeServer, *, stall_s: float = 30, **options: Any) -> Any:
    with Client(server.url, stall_s=stall_s) as client:
        return client.chat("hello", **options)


def test_an_answer_is_read_with_its_counts(server: FakeServer) -> None:
    reply = ask(server)
    assert (reply.text, reply.finish_reason) == ("ab", "length")
    assert reply.completion_tokens == 2
    assert reply.prompt_tokens == 8


def test_the_first_model_is_asked_with_our_options(server: FakeServer) -> None:
    ask(server, max_tokens=3, temperature=0)
    body = server.requests[0]
    assert body["model"] == "fake"
    assert (body["max_tokens"], body["temperature"]) == (3, 0)
    assert body["messages"] == [{"role": "user", "content": "hello"}]
    assert body["stream_options"] == {"include_usage": True}


def test_times_follow_the_pieces(server: FakeServer) -> None:
    server.script = lambda body: answer(["a", "b", "c"], body, first=0.05, between=0.03)
    reply = ask(server)
    times = [d.at for d in reply.deltas]
    # Lower bounds only: a sleep is never too short.
    assert times[0] >= 0.05
    assert times[1] - times[0] >= 0.02
    assert reply.first_token_s == times[0]
    assert reply.end_s >= times[-1]


def test_the_piece_with_the_role_is_not_the_first_token(server: FakeServer) -> None:
    def late(body: dict[str, Any]) -> Iterator[Step]:
        yield chunk("", role="assistant")
        yield 0.05
        yield from answer(["a", "b"], body)

    server.script = late
    assert (ask(server).first_token_s or 0) >= 0.05


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_apart(server: FakeServer, name: str) -> None:
    server.script = lambda body: [chunk(**{name: "hm"}), chunk("yes"), chunk(finish="stop")]
    reply = ask(server)
    assert (reply.reasoning, reply.text) == ("hm", "yes")
    assert reply.completion_tokens is None


def test_the_key_is_sent(server: FakeServer) -> None:
    with Client(server.url, api_key="secret") as client:
        client.models()
    assert server.keys == ["Bearer secret"]


@pytest.mark.parametrize("suffix", ["/", "/v1", "/v1/"])
def test_the_address_may_end_as_openai_clients_write_it(server: FakeServer, suffix: str) -> None:
    with Client(server.url + suffix) as client:
        assert client.models()[0]["id"] == "fake"


FAULTS: dict[str, tuple[list[Step], str]] = {
    "it breaks off": ([chunk("a"), DROP], "broke off without a finish reason"),
    "it ends without a reason": ([chunk("a"), "data: [DONE]\n\n"], "broke off without a finish reason"),
    "it sends garbage": ([chunk("a"), "data: {gar bage\n\n"], "not JSON: {gar bage"),
    "it sends a number": (["data: 7\n\n"], "not a JSON object: 7"),
    "it sends another kind of document": ([event({"hello": "world"})], "not a chat completion chunk"),
    "its choices are no list": ([event({"choices": 5})], "not a chat completion chunk"),
    "it reports an error": (
        [chunk("a"), event({"error": {"message": "CUDA out of memory"}})],
        "CUDA out of memory",
    ),
    "it reports an error as text": ([event({"error": "worker died"})], "worker died"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_stream_is_named(server: FakeServer, fault: str) -> None:
    steps, words = FAULTS[fault]
    server.script = lambda body: steps
    with pytest.raises(ServerError) as failed:
        ask(server)
    assert words in str(failed.value)
    assert server.url in str(failed.value)
    assert failed.value.exit_code == 1


def test_a_stall_is_noticed(server: FakeServer) -> None:
    server.script = lambda body: [chunk("a"), 3.0, chunk(finish="stop")]
    with pytest.raises(ServerError, match="nothing came"):
        ask(server, stall_s=0.2)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error": {"message": "too long"}}', "HTTP 400: too long"),
        ('{"detail": "Unexpected fields"}', "HTTP 400: Unexpected fields"),
        ('{"object": "error", "message": "no room"}', "HTTP 400: no room"),
        ("plain words", "HTTP 400: plain words"),
        ("", "HTTP 400: Bad Request"),
    ],
)
def test_a_refusal_is_quoted_in_every_servers_shape(server: FakeServer, body: str, words: str) -> None:
    server.error = lambda _: (400, body)
    with pytest.raises(ServerError) as failed:
        ask(server)
    assert words in str(failed.value)
    assert failed.value.status == 400


def test_a_wrong_key_says_which_variable_to_set(server: FakeServer) -> None:
    server.error = lambda _: (401, '{"error": {"message": "bad key"}}')
    with pytest.raises(InputError, match="Q38_API_KEY"):
        ask(server)


def test_no_server_is_a_missing_resource() -> None:
    with fake_server() as gone:
        url = gone.url
    with Client(url) as client:
        assert not client.healthy()
        with pytest.raises(ResourceError, match="no server answers"):
            client.models()


def test_a_list_of_models_that_is_none_is_refused(server: FakeServer) -> None:
    server.models = '{"models": []}'
    with Client(server.url) as client, pytest.raises(Q38Error, match="not a list of models"):
        client.models()


@pytest.mark.parametrize("url", ["localhost:30000", "ftp://x", "http://:99999999"])
def test_an_address_that_is_none_is_bad_input(url: str) -> None:
    with pytest.raises(Q38Error) as refused:
        Client(url).models()
    assert refused.value.exit_code in (2, 3)


def test_counts_along_the_stream_and_of_the_cache_are_kept(server: FakeServer) -> None:
    def counted(n: int) -> str:
        choice = {"index": 0, "delta": {"content": "ab"}, "finish_reason": "stop" if n == 4 else None}
        return event({"choices": [choice], "usage": {"prompt_tokens": 9, "completion_tokens": n}})

    last = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5}}
    server.script = lambda body: [counted(2), counted(4), event({"choices": [], "usage": last})]
    reply = ask(server)
    assert [d.tokens for d in reply.deltas] == [2, 4]
    assert (reply.completion_tokens, reply.cached_tokens) == (4, 5)


def test_a_page_that_is_not_there_is_none(server: FakeServer) -> None:
    server.pages["/metrics"] = lambda: "x 1"
    with Client(server.url) as client:
        assert client.text("/metrics") == "x 1"
    with Client("http://127.0.0.1:1") as client:
        assert client.text("/metrics") is None
