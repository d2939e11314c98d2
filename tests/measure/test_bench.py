"""The benchmark against a scripted server: what it asks, what it computes, and when it gives up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from q38.base.errors import InputError, ResourceError
from q38.measure.bench import BenchFailed, Run, as_run, bench_serve, check_writable, summarize
from q38.measure.prompts import load_prompt_text
from q38.serving.client import Delta, Reply, ServerError
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


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as fake:
        fake.script = lambda body: answer(PIECES, body, first=0.002, between=0.001)
        yield fake


def bench(server: FakeServer, **options: Any) -> dict[str, Any]:
    return bench_serve(server.url, **{"contexts": [100], "max_tokens": 4, "repeats": 2, **options})


def reply(times: list[float], end: float, tokens: int) -> Reply:
    return Reply("length", 50, tokens, end, [Delta(t, text="x") for t in times])


def test_the_figures_follow_from_the_times() -> None:
    run = as_run(reply([0.5, 0.6, 0.7, 0.9], 0.9, 4), where="")
    assert run.first_token_s == 0.5
    assert run.prefill_tokens_per_s == pytest.approx(50 / 0.5)
    assert run.decode_tokens_per_s == pytest.approx(3 / 0.4)
    assert run.intervals_s == pytest.approx((0.1, 0.1, 0.2))


def test_decode_speed_counts_tokens_that_show_nothing() -> None:
    # 10 tokens, of which the last 7 are invisible: the finish reason's time counts, not the last piece's.
    run = as_run(reply([0.5, 0.6, 0.7], 1.4, 10), where="")
    assert run.decode_tokens_per_s == pytest.approx(9 / 0.9)


def test_a_cell_is_made_of_medians() -> None:
    runs = [Run(100, 5, first, first + 1, (0.1, 0.3)) for first in (1.0, 2.0, 9.0)]
    cell = summarize(128, runs)
    assert cell["first_token_s"] == 2.0
    assert cell["prefill_tokens_per_s"] == 50
    assert cell["decode_tokens_per_s"] == pytest.approx(4.0)
    assert cell["inter_token_ms"]["median"] == pytest.approx(200)
    assert cell["inter_token_ms"]["p95"] == pytest.approx(300)
    assert cell["tokens_per_piece"] == pytest.approx(5 / 3)
    assert len(cell["runs"]) == 3


def test_the_result_says_what_was_measured_on_what(server: FakeServer) -> None:
    result = bench(server, contexts=[100, 400])
    assert json.loads(json.dumps(result)) == result
    assert result["schema"] == "q38.bench/1"
    assert result["kind"] == "MEASURED"
    assert result["server"]["model"] == "fake"
    assert result["text"]["sha256"] == load_prompt_text().sha256
    assert result["machine"]["runs_the_server"] is True
    assert result["machine"]["cores"] > 0
    assert "--contexts 100,400" in result["command"]
    assert [c["context"] for c in result["contexts"]] == [100, 400]


def test_prompt_lengths_are_the_servers_counts_and_near_the_target(server: FakeServer) -> None:
    result = bench(server, contexts=[64, 1000])
    asked = {prompt_tokens(body) for body in server.requests}
    for cell in result["contexts"]:
        for run in cell["runs"]:
            assert run["prompt_tokens"] in asked
            assert abs(run["prompt_tokens"] - cell["context"]) <= 0.1 * cell["context"]


def test_every_prompt_has_its_own_nonce_in_front_and_its_own_text(server: FakeServer) -> None:
    bench(server, repeats=3)
    prompts = [body["messages"][0]["content"] for body in server.requests]
    heads = [p.split("]")[0] for p in prompts]
    assert len(set(heads)) == len(prompts) == 2 + 1 + 3
    assert all(h.startswith("[") and len(h) == 17 for h in heads)
    assert len({p.split("]")[1] for p in prompts}) == len(prompts)


def test_the_warm_up_is_not_measured(server: FakeServer) -> None:
    result = bench(server, repeats=1)
    assert len(server.requests) == 2 + 1 + 1
    assert len(result["contexts"][0]["runs"]) == 1


def test_answers_go_to_their_full_length(server: FakeServer) -> None:
    bench(server)
    assert all(b["ignore_eos"] is True for b in server.requests)
    # Calibration needs no length, and the least that has a speed is 2.
    assert [b["max_tokens"] for b in server.requests] == [2, 2, 4, 4, 4]


def test_a_server_that_does_not_know_ignore_eos_is_measured_without(server: FakeServer) -> None:
    server.error = lambda body: (400, '{"error": "unknown: ignore_eos"}') if "ignore_eos" in body else None
    result = bench(server)
    assert result["settings"]["ignore_eos"] is False
    assert sum("ignore_eos" in b for b in server.requests) == 1


def test_bundled_tokens_are_seen(server: FakeServer) -> None:
    server.script = lambda body: answer(PIECES, body, between=0.001, tokens_per_piece=3)
    assert bench(server)["contexts"][0]["tokens_per_piece"] == 3


FAULTS: dict[str, tuple[list[Step], str]] = {
    "breaks off": ([chunk("a"), DROP], "broke off"),
    "garbage": ([chunk("a"), "data: ]\n\n"], "not JSON"),
    "an error": ([chunk("a"), event({"error": {"message": "out of memory"}})], "out of memory"),
    "stall": ([chunk("a"), 2.0, chunk(finish="stop")], "nothing came"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_one_failed_request_fails_the_benchmark_and_names_the_cell(server: FakeServer, fault: str) -> None:
    steps, words = FAULTS[fault]
    good = server.script
    # The fifth request: calibration twice, warm-up, repeat 1, repeat 2.
    server.script = lambda body: steps if len(server.requests) == 5 else good(body)
    with pytest.raises(BenchFailed) as failed:
        bench(server, stall_s=0.3)
    assert "context 100, repeat 2 of 2" in str(failed.value)
    assert words in str(failed.value)
    assert failed.value.exit_code == 1
    assert len(server.requests) == 5


def test_a_refused_request_fails_the_benchmark(server: FakeServer) -> None:
    server.error = lambda body: (500, "boom") if len(server.requests) > 3 else None
    with pytest.raises(BenchFailed, match="HTTP 500: boom"):
        bench(server)


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda body: [chunk("a"), 0.002, chunk("b"), chunk(finish="stop")], "no token counts"),
        (
            lambda body: [chunk(role="assistant"), chunk(finish="stop"), usage(body, 3)],
            "none of 3 tokens was visible",
        ),
        (lambda body: [chunk("a"), 0.002, chunk(finish="stop"), usage(body, 1)], "ended after 1 tokens"),
    ],
    ids=["no usage", "nothing visible", "one token"],
)
def test_an_answer_without_the_makings_of_a_speed_is_refused(
    server: FakeServer, script: Any, words: str
) -> None:
    server.script = script
    with pytest.raises(BenchFailed, match=words):
        bench(server)


def test_a_context_that_the_model_lacks_is_refused_before_any_request(server: FakeServer) -> None:
    with pytest.raises(InputError, match="exceed the server's context of 100000"):
        bench(server, contexts=[99_999])
    assert server.requests == []


def test_an_unknown_model_is_refused_with_the_known_ones(server: FakeServer) -> None:
    with pytest.raises(InputError, match=r"(?i)it has: fake"):
        bench(server, model="other")


@pytest.mark.parametrize(
    "options", [{"contexts": []}, {"contexts": [0]}, {"max_tokens": 1}, {"repeats": 0}], ids=str
)
def test_arguments_that_measure_nothing_are_refused(server: FakeServer, options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        bench(server, **options)
    assert server.requests == []


def test_no_server_is_a_missing_resource() -> None:
    with fake_server() as gone:
        url = gone.url
    with pytest.raises(ResourceError, match="no server answers"):
        bench_serve(url)


def test_an_unwritable_result_is_refused_early(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError):
        check_writable(tmp_path / "file" / "out.json")
    check_writable(tmp_path / "new" / "out.json")
    assert not (tmp_path / "new" / "out.json").exists()


def test_a_reply_without_a_piece_is_no_run() -> None:
    with pytest.raises(ServerError):
        as_run(Reply("stop", 5, 2, 1.0, []), where="")
