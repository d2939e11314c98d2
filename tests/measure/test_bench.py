"""The benchmark against a scripted server: what it asks, what it computes, and when it gives up."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.measure.bench.plan import Plan, parse_numbers
from q38.measure.bench.rounds import Series
from q38.measure.bench.run import BenchFailed, bench_serve
from q38.measure.bench.sample import Round
from q38.measure.prompts import CONTINUE, RETELL, load_prompt_text
from tests.measure.test_bench_sample import sample
from tests.serving.fake_server import (
    DROP,
    FakeServer,
    Step,
    answer,
    chunk,
    event,
    fake_server,
    prompt_tokens,
    usage,
)

PIECES = ["one ", "two ", "three ", "four"]
CALIBRATION = 2  # requests


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        fake.script = lambda body: answer(PIECES, body, first=0.002, between=0.001)
        yield fake


def bench(server: FakeServer, *, options: dict[str, Any] | None = None, **plan: Any) -> dict[str, Any]:
    """Cold rounds of one request, one of them to warm up, unless asked otherwise."""
    plan = {"depths": (100,), "prefixes": ("cold",), "max_tokens": 4, "repeats": 2, "max_warmup": 1, **plan}
    return bench_serve(server.url, Plan(**plan), **(options or {}))


def prompts(server: FakeServer) -> list[str]:
    return [body["messages"][0]["content"] for body in server.requests[CALIBRATION:]]


def test_the_result_says_what_was_measured_on_what(server: FakeServer) -> None:
    result = bench(server, depths=(100, 400))
    assert json.loads(json.dumps(result)) == result
    assert (result["schema"], result["kind"]) == ("q38.bench/2", "MEASURED")
    assert (result["complete"], result["failed"]) == (True, None)
    assert result["server"]["model"] == "fake"
    assert result["text"]["sha256"] == load_prompt_text().sha256
    assert result["machine"]["runs_the_server"] is True
    assert result["machine"]["cores"] > 0
    assert "--depths 100,400" in result["command"]
    assert [c["depth"] for c in result["cells"]] == [100, 400]


def test_prompt_lengths_are_the_servers_counts_and_near_the_depth(server: FakeServer) -> None:
    result = bench(server, depths=(64, 1000))
    asked = {prompt_tokens(body) for body in server.requests}
    for cell in result["cells"]:
        for played in cell["rounds"]:
            tokens = played["requests"][0]["prompt_tokens"]
            assert tokens in asked
            assert abs(tokens - cell["depth"]) <= 0.1 * cell["depth"]


def test_every_cold_prompt_has_its_own_nonce_in_front_and_its_own_text(server: FakeServer) -> None:
    bench(server, repeats=4)
    heads = [p.split("]")[0] for p in prompts(server)]
    assert len(set(heads)) == len(heads) == 1 + 4
    assert all(h.startswith("[") and len(h) == 17 for h in heads)
    assert len({p.split("]")[1] for p in prompts(server)}) == len(heads)


def test_a_warm_prompt_repeats_the_cold_one_up_to_its_question(server: FakeServer) -> None:
    result = bench(server, prefixes=("cold", "warm"))
    assert [c["prefix"] for c in result["cells"]] == ["cold", "warm"]
    told = prompts(server)
    for cold, warm in zip(told[::2], told[1::2], strict=True):
        assert cold.removesuffix(CONTINUE) == warm.removesuffix(RETELL)
        assert cold.endswith(CONTINUE) and warm.endswith(RETELL)


def test_warm_alone_still_sends_the_cold_prompt_first(server: FakeServer) -> None:
    result = bench(server, prefixes=("warm",))
    assert [c["prefix"] for c in result["cells"]] == ["warm"]
    assert result["cells"][0]["prefill_tokens_per_s"] is None
    assert [p.endswith(CONTINUE) for p in prompts(server)] == [True, False] * 3


def test_requests_of_a_round_are_under_way_at_once(server: FakeServer) -> None:
    met = threading.Barrier(3, timeout=20)

    def together(body: dict[str, Any]) -> Iterator[Step]:
        if body["max_tokens"] > 2:  # not a request of the calibration
            met.wait()
        yield from answer(PIECES, body, between=0.001)

    server.script = together
    result = bench(server, concurrency=(3,))
    cell = result["cells"][0]
    assert [len(played["requests"]) for played in cell["rounds"]] == [3, 3]
    assert len(set(prompts(server))) == 3 * 3


def test_warm_cells_are_made_at_the_lowest_concurrency(server: FakeServer) -> None:
    result = bench(server, concurrency=(1, 2), prefixes=("cold", "warm"))
    assert [(c["concurrency"], c["prefix"]) for c in result["cells"]] == [
        (1, "cold"),
        (1, "warm"),
        (2, "cold"),
    ]


def test_warm_up_goes_on_until_two_rounds_agree(server: FakeServer) -> None:
    first = itertools.chain([0.4, 0.2, 0.05], itertools.repeat(0.05))

    def settling(body: dict[str, Any]) -> Iterator[Step]:
        yield from answer(PIECES, body, first=next(first) if body["max_tokens"] > 2 else 0, between=0.02)

    server.script = settling
    cell = bench(server, max_warmup=8)["cells"][0]
    assert cell["warmup"]["rounds"] >= 3  # 0.4 and 0.2 do not agree, nor do 0.2 and 0.05
    assert len(cell["rounds"]) == 2


def test_a_server_that_never_settles_is_measured_and_told_so(server: FakeServer) -> None:
    first = itertools.count(1)

    def slower(body: dict[str, Any]) -> Iterator[Step]:
        yield from answer(PIECES, body, first=0.02 * 2 ** next(first) if body["max_tokens"] > 2 else 0)

    server.script = slower
    result = bench(server, max_warmup=2, repeats=1)
    assert result["cells"][0]["warmup"] == {"rounds": 2, "steady": False}


def test_steadiness_looks_at_the_first_and_the_last_token() -> None:
    def steady(*times: tuple[float, float]) -> bool:
        return Series(None, [Round((sample(a, b),)) for a, b in times]).steady  # type: ignore[arg-type]

    assert steady((1.0, 2.0), (1.05, 2.1))
    assert not steady((1.0, 2.0))
    assert not steady((1.0, 2.0), (1.2, 2.0))
    assert not steady((1.0, 2.0), (1.0, 2.4))
    assert steady((9.0, 9.5), (1.0, 2.0), (1.05, 2.1))


def test_answers_go_to_their_full_length(server: FakeServer) -> None:
    bench(server)
    assert all(b["ignore_eos"] is True for b in server.requests)
    # Calibration needs no length, and the least that has a speed is 2.
    assert [b["max_tokens"] for b in server.requests] == [2, 2, 4, 4, 4]


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        ({"ignore_eos"}, "unknown field ignore_eos"),
        ({"continuous_usage_stats"}, "stream_options: no such option"),
        ({"continuous_usage_stats", "ignore_eos"}, "bad request"),
    ],
    ids=["ignore_eos", "continuous_usage_stats", "both, without saying which"],
)
def test_a_server_that_refuses_extra_fields_is_measured_without_them(
    server: FakeServer, refused: set[str], message: str
) -> None:
    def error(body: dict[str, Any]) -> tuple[int, str] | None:
        sent = set(body) | set(body["stream_options"])
        return (400, json.dumps({"error": message})) if sent & refused else None

    server.error = error
    result = bench(server)
    assert result["settings"]["ignore_eos"] is ("ignore_eos" not in refused)
    accepted = [b for b in server.requests if error(b) is None]
    assert len(accepted) == CALIBRATION + 3
    assert all(b["stream_options"]["include_usage"] for b in accepted)


def test_tokens_that_the_server_counts_along_are_believed(server: FakeServer) -> None:
    def counted(body: dict[str, Any]) -> Iterator[Step]:
        for n in (2, 4, 6):
            yield 0.001
            chunk_usage = {"prompt_tokens": prompt_tokens(body), "completion_tokens": n}
            yield event({"choices": [{"index": 0, "delta": {"content": "ab"}}], "usage": chunk_usage})
        yield chunk(finish="length")
        yield usage(body, 6)

    server.script = counted
    cell = bench(server)["cells"][0]
    assert (cell["counted"], cell["tokens_per_piece"]) == ("by the server", 2)


def test_bundled_tokens_that_nobody_counts_are_told(server: FakeServer) -> None:
    server.script = lambda body: answer(PIECES, body, between=0.001, tokens_per_piece=2)
    cell = bench(server)["cells"][0]
    assert (cell["counted"], cell["tokens_per_piece"]) == ("on average", 2)


FAULTS: dict[str, tuple[list[Step], str]] = {
    "dies": ([chunk("a"), DROP], "broke off"),
    "garbage": ([chunk("a"), "data: ]\n\n"], "not JSON"),
    "an error": ([chunk("a"), event({"error": {"message": "out of memory"}})], "out of memory"),
    "stall": ([chunk("a"), 2.0, chunk(finish="stop")], "nothing came"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failed_request_ends_the_run_and_what_was_measured_is_kept_and_marked(
    server: FakeServer, fault: str
) -> None:
    steps, words = FAULTS[fault]
    good = server.script
    # Calibration, then warm-up and two rounds at depth 100, warm-up and one round at depth 200.
    server.script = lambda body: steps if len(server.requests) == CALIBRATION + 3 + 3 else good(body)
    saved: list[dict[str, Any]] = []
    with pytest.raises(BenchFailed) as failed:
        bench(
            server,
            depths=(100, 200, 300),
            options={"stall_s": 0.3, "save": lambda r: saved.append(json.loads(json.dumps(r)))},
        )
    assert "depth 200, cold prefix, repeat 2 of 2" in str(failed.value)
    assert words in str(failed.value)
    assert failed.value.exit_code == 1
    assert len(server.requests) == CALIBRATION + 6
    partial = saved[-1]
    assert partial == failed.value.partial
    assert partial["complete"] is False
    assert partial["failed"]["cell"] == "depth 200, cold prefix, repeat 2 of 2"
    assert [(c["depth"], c["complete"], len(c["rounds"])) for c in partial["cells"]] == [
        (100, True, 2),
        (200, False, 1),
    ]


def test_one_failure_among_many_at_once_fails_the_cell(server: FakeServer) -> None:
    good, number = server.script, itertools.count(1)
    server.script = lambda body: [chunk("a"), DROP] if next(number) == CALIBRATION + 2 else good(body)
    with pytest.raises(BenchFailed, match=r"3 at once.*broke off"):
        bench(server, concurrency=(3,))


def test_a_failure_of_the_calibration_keeps_nothing(server: FakeServer) -> None:
    server.error = lambda body: (500, "boom")
    saved: list[Any] = []
    with pytest.raises(BenchFailed, match="calibration: HTTP 500: boom"):
        bench(server, options={"save": saved.append})
    assert saved == []


def test_a_cold_prompt_that_the_server_already_had_is_refused(server: FakeServer) -> None:
    def cached(body: dict[str, Any]) -> Iterator[Step]:
        yield from itertools.islice(answer(PIECES, body, between=0.001), 11)
        counts = {
            "prompt_tokens": 500,
            "completion_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 400},
        }
        yield event({"choices": [], "usage": counts})

    server.script = cached
    with pytest.raises(BenchFailed, match="400 of 500 prompt tokens were in the server's cache"):
        bench(server)


def test_a_prompt_that_misses_its_depth_is_refused(server: FakeServer) -> None:
    def forgetful(body: dict[str, Any]) -> Iterator[Step]:
        yield from itertools.islice(answer(PIECES, body, between=0.001), 11)
        yield event({"choices": [], "usage": {"prompt_tokens": 60, "completion_tokens": 4}})

    server.script = forgetful
    with pytest.raises(BenchFailed, match="a prompt has 60 tokens, not 2000"):
        bench(server, depths=(2000,), repeats=1)


def test_a_depth_that_the_model_lacks_is_refused_before_any_request(server: FakeServer) -> None:
    with pytest.raises(InputError, match="exceed the server's context of 100000"):
        bench(server, depths=(99_999,))
    assert server.requests == []


def test_an_unknown_model_is_refused_with_the_known_ones(server: FakeServer) -> None:
    with pytest.raises(InputError, match=r"(?i)it has: fake"):
        bench(server, options={"model": "other"})


@pytest.mark.parametrize(
    "plan",
    [
        {"depths": ()},
        {"depths": (0,)},
        {"depths": (64, 64)},
        {"concurrency": (0,)},
        {"concurrency": (1000,)},
        {"prefixes": ("lukewarm",)},
        {"prefixes": ()},
        {"max_tokens": 1},
        {"repeats": 0},
        {"max_warmup": 0},
    ],
    ids=str,
)
def test_what_measures_nothing_is_refused(plan: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Plan(**{"depths": (64,), **plan})


def test_a_plan_knows_how_many_rounds_it_is_at_most(server: FakeServer) -> None:
    plan = Plan((64, 128), (1, 2), max_tokens=4, repeats=2, max_warmup=1)
    assert plan.most_rounds == 2 * (2 * 3 + 3)


def test_numbers_may_be_written_with_k() -> None:
    assert parse_numbers("128, 2k,10K", where="--depths") == (128, 2048, 10_240)
    for text in ("12m", "", "1,,2", "1.5k", "-1"):
        with pytest.raises(InputError, match="--depths"):
            parse_numbers(text, where="--depths")


def test_no_server_is_a_missing_resource() -> None:
    with fake_server() as gone:
        url = gone.url
    with pytest.raises(ResourceError, match="no server answers"):
        bench_serve(url)


def test_own_text_is_used_and_hashed(server: FakeServer, tmp_path: Any) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("Ahoy there.\n\n" * 40)
    result = bench(server, options={"text": file})
    assert "Ahoy there." in prompts(server)[0]
    assert result["text"]["sha256"] != load_prompt_text().sha256


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"depth": 4000}, "no cell in common"),
        ({"rounds": [{}]}, "one round has no spread"),
    ],
    ids=["other depth", "one round"],
)
def test_a_comparison_that_cannot_be_made_is_refused_before_the_measurement(
    server: FakeServer, changes: dict[str, Any], words: str
) -> None:
    base = bench(server)
    base["cells"][0] |= changes
    asked = len(server.requests)
    with pytest.raises(InputError, match=words):
        bench(server, options={"against": base, "allow_different": True})
    assert len(server.requests) == asked + CALIBRATION
