"""Each behaviour on a real server, and through a proxy that breaks it: the right row must fail."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.measure.behaviour import registry
from q38.measure.verify_server import ServerOptions, verify_server
from tests.measure.faulty_proxy import Change, Fault, Proxy, Reply, Stall, faulty_proxy

if TYPE_CHECKING:
    from q38.serving.launch import Server

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OPTIONS: dict[str, Any] = {"answer_tokens": 12, "capability": False, "stall_s": 60.0}
USAGE = {"prompt_tokens": 9, "completion_tokens": 1}


def run(url: str, *only: str, options: dict[str, Any] | None = None, **checks: Any) -> dict[str, Any]:
    return verify_server(
        url,
        options=ServerOptions(**{**OPTIONS, **(options or {})}),
        checks=registry.Options(only=only, **checks),
    )


def rows(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for part in document["parts"] for check in part["checks"]}


def whole(text: str = "", finish: str = "stop", **fields: Any) -> Reply:
    """A whole chat answer."""
    logprobs = fields.pop("logprobs", None)
    message = {"role": "assistant", "content": text, **fields}
    choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": logprobs}
    return Reply(json.dumps({"choices": [choice], "usage": USAGE}))


@pytest.fixture
def proxy(tiny_server: Server) -> Iterator[Proxy]:
    with faulty_proxy(tiny_server.url) as proxy:
        yield proxy


class TestARealServer:
    @pytest.fixture(scope="class")
    def document(self, tiny_server: Server) -> dict[str, Any]:
        """Everything, on the untrained tiny model."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("q38.measure.behaviour.prefix_hit._TOKENS", 100)
            return run(tiny_server.url, long_prompt=400, needles=[300], depths=[0.2, 0.8])

    def test_no_row_fails(self, document: dict[str, Any]) -> None:
        assert {
            name: check["note"] for name, check in rows(document).items() if check["passed"] is False
        } == {}
        assert document["passed"] and document["failed"] == 0

    def test_the_protocol_is_judged(self, document: dict[str, Any]) -> None:
        passed = {name for name, check in rows(document).items() if check["passed"]}
        assert passed >= {
            "one-token", "stop-strings", "scripts", "cancelled-stream", "tool-conversation", "context-limit", "needles-300-read",
        }  # fmt: skip

    def test_what_the_server_lacks_is_no_pass(self, document: dict[str, Any]) -> None:
        found = rows(document)
        for name, words in {
            "finite-logprobs": "logprobs is not supported",
            "json-output": "response_format is not supported",
            "nll": "offers no prompt log-probabilities",
            "decode-prefill": "offers no prompt log-probabilities",
            "prefix-hit": "cached tokens are not reported",
            "several-chunks": "one chunk",
        }.items():
            assert found[name]["passed"] is None and words in found[name]["note"], found[name]

    def test_what_an_untrained_model_cannot_is_recorded(self, document: dict[str, Any]) -> None:
        capability = next(part for part in document["parts"] if part["name"] == "capability")
        assert {"tool-call", "reasoning", "repetition", "script-text", "needles-300"} <= {
            check["name"] for check in capability["checks"]
        }
        assert all(check["passed"] is None and "recorded" in check["note"] for check in capability["checks"])

    def test_the_document_says_what_was_checked(self, document: dict[str, Any], tiny_server: Server) -> None:
        assert document["server"]["model"] == "tiny"
        assert document["server"]["context"] > 0
        assert Path(document["model"]) == Path(document["model"]).resolve()
        assert document["parts"][0]["seconds"].keys() >= {"one-token", "scripts"}
        json.loads(json.dumps(document, allow_nan=False))


def test_a_tiny_model_is_not_judged_by_what_it_cannot_do(tiny_server: Server) -> None:
    document = run(tiny_server.url, "repetition", "one-token", options={"capability": None})
    assert document["capability_judged"] is False
    assert rows(document)["repetition"]["passed"] is None


def test_an_untrained_model_fails_where_it_is_judged(tiny_server: Server) -> None:
    document = run(tiny_server.url, "tool-conversation", options={"capability": True})
    assert rows(document)["tool-conversation"]["passed"]
    assert rows(document)["tool-call"]["passed"] is False
    assert not document["passed"]


def test_rows_without_a_verdict_alone_are_no_pass(tiny_server: Server) -> None:
    document = run(tiny_server.url, "nll")
    assert (document["passed"], document["failed"], document["unjudged"]) == (False, 0, 1)


class TestAServerThatBreaks:
    def test_one_that_dies_fails_the_row_in_hand_and_the_rest_is_not_run(self, proxy: Proxy) -> None:
        def dies(path: str, body: dict[str, Any]) -> Fault:
            if "stop" in body:
                proxy.die()
            return None

        proxy.fault = dies
        document = run(proxy.url, "one-token", "stop-strings", "scripts", "context-limit")
        found = rows(document)
        assert not document["passed"]
        assert found["one-token"]["passed"]
        assert found["stop-strings"]["passed"] is False
        assert "connection broke" in found["stop-strings"]["note"]
        for name in ("scripts", "context-limit"):
            assert found[name]["passed"] is None
            assert "not run: the server does not answer any more" in found[name]["note"]

    def test_one_that_stalls_once_fails_that_row_only(self, proxy: Proxy) -> None:
        proxy.fault = lambda path, body: Stall(2.0) if "stop" in body else None
        document = run(proxy.url, "stop-strings", "one-token", options={"stall_s": 0.7})
        found = rows(document)
        assert "nothing came" in found["stop-strings"]["note"]
        assert found["stop-strings"]["passed"] is False and found["one-token"]["passed"]

    def test_one_that_stalls_for_good_is_given_up(self, proxy: Proxy) -> None:
        proxy.fault = lambda path, body: Stall(1.0) if body else None
        document = run(proxy.url, "one-token", "scripts", options={"stall_s": 0.3})
        found = rows(document)
        assert found["one-token"]["passed"] is False
        assert "not run" in found["scripts"]["note"] and not document["passed"]

    @pytest.mark.parametrize("garbage", ["", "<html>", "5", '{"choices": 5}'])
    def test_garbage_is_quoted(self, proxy: Proxy, garbage: str) -> None:
        proxy.fault = lambda path, body: Reply(garbage) if path == TEXT else None
        found = rows(run(proxy.url, "one-token"))["one-token"]
        assert found["passed"] is False
        assert (
            "not JSON" in found["note"]
            or "not a completion" in found["note"]
            or "not a JSON" in found["note"]
        )

    def test_bytes_that_are_no_text_fail_the_stream(self, proxy: Proxy) -> None:
        half = "海".encode()[:2]
        event = b'data: {"choices": [{"delta": {"content": "' + half + b'"}}]}\n\n'
        proxy.fault = lambda path, body: Reply(event) if body.get("stream") else None
        found = rows(run(proxy.url, "scripts"))["scripts"]
        assert found["passed"] is False and "not UTF-8: e6 b5" in found["note"]


Make = Callable[[str, dict[str, Any]], Fault]


def without(field: str) -> Make:
    def fault(path: str, body: dict[str, Any]) -> Fault:
        body.pop(field, None)
        return None

    return fault


def changed(when: Callable[[dict[str, Any]], bool], old: str, new: str) -> Make:
    return lambda path, body: Change(lambda line: line.replace(old, new)) if when(body) else None


def replied(when: Callable[[dict[str, Any]], bool], reply: Reply) -> Make:
    return lambda path, body: reply if when(body) else None


def shortened(path: str, body: dict[str, Any]) -> Fault:
    for message in body.get("messages", []):
        message["content"] = message["content"][:100]
    return None


def is_long(body: dict[str, Any]) -> bool:
    return len(str(body.get("messages"))) > 10_000


BAD_CALL = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": "{oops"}}
NAN = {"content": [{"token": "a", "logprob": float("nan"), "top_logprobs": []}]}
COUNT = count()
SPLIT = 'data: {"choices": [{"delta": {"content": "\ufffd\ufffd"}, "finish_reason": "stop"}]}\n\n'
FAULTS: dict[str, tuple[str, Make, str]] = {
    "no token counts": ("one-token", changed(lambda b: True, '"usage"', '"used"'), "no token counts"),
    "too many tokens": ("one-token", changed(lambda b: True, '"completion_tokens":1', '"completion_tokens":2'), "2 were counted"),
    "the stop string is ignored": ("stop-strings", without("stop"), "stop string is in the text"),
    "the answer differs after a cancelled stream": (
        "cancelled-stream",
        lambda path, body: whole(f"{next(COUNT)} loaves", "length") if body and not body.get("stream") else None,
        "of the answer are the same",
    ),
    "a stream that shows split characters": (
        "scripts",
        lambda path, body: Reply(SPLIT) if body.get("stream") else whole("海" * 8),
        "replacement character",
    ),
    "arguments that are no JSON": (
        "tool-conversation",
        replied(lambda b: "tools" in b and not b.get("stream"), whole("", "tool_calls", tool_calls=[BAD_CALL])),
        "no JSON object",
    ),
    "response_format is ignored": (
        "json-output",
        replied(lambda b: "response_format" in b, whole("Paris has five letters.")),
        "not JSON",
    ),
    "log-probabilities that are no numbers": (
        "finite-logprobs",
        replied(lambda b: "logprobs" in b, whole("a", logprobs=NAN)),
        "log-probability nan",
    ),
    "too long a prompt is cut in silence": ("context-limit", shortened, "was accepted"),
    "too long a prompt is an internal error": (
        "context-limit",
        replied(is_long, Reply('{"error": {"message": "boom"}}', 500)),
        "is no clear refusal",
    ),
    "too long a prompt is refused without a word": (
        "context-limit",
        replied(is_long, Reply('{"error": {"message": "no"}}', 400)),
        "without the reason",
    ),
    "a prompt over several chunks is cut": ("several-chunks", shortened, "prompt tokens where about"),
    "a needle prompt is cut": ("needles", shortened, "prompt tokens where about"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_fails_its_row_with_the_reason(proxy: Proxy, fault: str) -> None:
    name, make, words = FAULTS[fault]
    proxy.fault = make
    lengths = {"needles": [1200]} if name == "needles" else {}
    document = run(proxy.url, name, long_prompt=1200, **lengths)
    failed = [check for check in rows(document).values() if check["passed"] is False]
    assert failed and not document["passed"], rows(document)
    assert failed[0]["name"].startswith(name)
    assert words in failed[0]["note"]


def test_a_reported_prefix_hit_is_judged(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("q38.measure.behaviour.prefix_hit._TOKENS", 100)

    def usage(cached: int) -> Make:
        details = f'"prompt_tokens_details":{{"cached_tokens":{cached}}},"prompt_tokens":'
        return changed(lambda body: True, '"prompt_tokens":', details)

    proxy.fault = usage(64)
    hit = rows(run(proxy.url, "prefix-hit"))["prefix-hit"]
    assert hit["passed"] and hit["value"] == 64
    proxy.fault = usage(0)
    miss = rows(run(proxy.url, "prefix-hit"))["prefix-hit"]
    assert miss["passed"] is False and "came from the cache" in miss["note"]


def test_an_endless_answer_is_seen(proxy: Proxy) -> None:
    endless = whole("I see. " + "And then again. " * 30, "length")
    proxy.fault = lambda path, body: endless if body else None
    document = run(proxy.url, "repetition", options={"capability": True})
    assert rows(document)["repetition"]["passed"] is False
    assert "And then again." in rows(document)["repetition"]["note"]


def test_needles_are_found_by_depth(proxy: Proxy) -> None:
    def reads(path: str, body: dict[str, Any]) -> Fault:
        text = body["messages"][0]["content"] if "messages" in body else ""
        if "Note: " not in text:
            return None
        last = text.rindex("Note: ")
        found = text[:last].count("Note: ")
        codes = [part.split(" is ")[1][:6] for part in text.split("Note: ")[1:]][:found]
        chunk = {
            "choices": [{"delta": {"content": " ".join(codes)}, "finish_reason": "stop"}],
            "usage": {**USAGE, "prompt_tokens": 300},
        }
        return Reply(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n")

    proxy.fault = reads
    document = run(proxy.url, "needles", needles=[300], depths=[0.1, 0.5, 0.9], options={"capability": True})
    row = rows(document)["needles-300"]
    assert (row["passed"], row["value"], row["limit"]) == (False, 2.0, 3.0)
    assert "missed at 90%" in row["note"]


class TestRefusals:
    def test_no_server_is_a_missing_resource(self) -> None:
        with faulty_proxy("http://127.0.0.1:1") as gone:
            url = gone.url
        with pytest.raises(ResourceError, match="no server answers"):
            run(url)

    @pytest.mark.parametrize(
        ("server", "options", "checks", "words"),
        [
            ("absent", {}, {}, "no such directory"),
            ("http://127.0.0.1:1", {"device": "cpu"}, {}, "is for a server that is started here"),
            ("http://127.0.0.1:1", {"answer_tokens": 0}, {}, "at least one token"),
            ("http://127.0.0.1:1", {}, {"only": ["speed"]}, "unknown check 'speed'"),
        ],
    )
    def test_senseless_options_are_refused_before_any_request(
        self, server: str, options: dict[str, Any], checks: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(InputError, match=words):
            verify_server(server, options=ServerOptions(**options), checks=registry.Options(**checks))

    def test_an_unknown_model_is_refused_with_the_known_ones(self, tiny_server: Server) -> None:
        with pytest.raises(InputError, match=r"(?i)it has: tiny"):
            run(tiny_server.url, options={"model": "other"})

    def test_needles_beyond_the_context_are_refused(self, tiny_server: Server) -> None:
        with pytest.raises(InputError, match="exceed the server's context"):
            run(tiny_server.url, "needles", needles=[10**6])
