"""What a server says about itself, beside what is measured."""

from __future__ import annotations

import json
from typing import Any

import pytest

from q38.measure.bench.counters import parse_metrics, parse_residency, server_figures
from q38.measure.bench.plan import Plan
from q38.measure.bench.run import bench_serve
from q38.measure.bench.target import Target
from tests.serving.fake_server import answer, fake_server

METRICS = """\
# HELP sglang:prompt_tokens_total Number of prefill tokens processed.
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="a b",rank="0"} 1000.0
sglang:prompt_tokens_total{model_name="a b",rank="1"} 24.0
sglang:cached_tokens_total{model_name="a b"} 2.5e+02 1700000000
sglang:gen_throughput 55.1
broken line
sglang:odd NaN
"""


def test_counters_are_summed_over_their_labels() -> None:
    values = parse_metrics(METRICS)
    assert values["sglang:prompt_tokens_total"] == 1024
    assert values["sglang:cached_tokens_total"] == 250
    assert values["sglang:gen_throughput"] == 55.1
    assert parse_metrics("") == {}
    assert parse_metrics("<html>no metrics</html>") == {}


@pytest.mark.parametrize(
    ("hits", "lookups"),
    [
        ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
        ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
    ],
)
def test_the_hit_rate_is_that_of_the_measured_rounds_by_prefix(hits: str, lookups: str) -> None:
    """The page counts 100 tokens a request, and finds 90 of them where the prompt came before, and in the warm-up."""
    with fake_server() as fake:

        def page() -> str:
            found = looked = 0
            seen: set[str] = set()
            for i, body in enumerate(fake.requests):
                text = body["messages"][0]["content"]
                nonce = text[:18]
                looked += 100
                found += 90 * (nonce in seen or i < 4)
                seen.add(nonce)
            return f"{hits} {found}\n{lookups} {looked}\n"

        fake.pages["/metrics"] = page
        fake.script = lambda body: answer(["a", "b", "c"], body, between=0.001)
        cells = bench_serve(fake.url, Plan((64,), max_tokens=3, repeats=2, max_warmup=1))["cells"]
    assert [c["server"]["prefix_hit_rate"] for c in cells] == [0, 0.9]


def residency(tokens: int, hit_rate: float | None, *, ngram: bool = True) -> str:
    """The status of q38's rows after so many decoded tokens: 3 MB a token over the link, 12 MB from device memory."""
    decode = {
        "tokens": tokens,
        "hit_rate": hit_rate,
        "host_bytes": 3_000_000 * tokens,
        "device_bytes": 12_000_000 * tokens,
    }
    status: dict[str, Any] = {"row_bytes": 1, "traffic": {"decode": decode, "prefill": {}}}
    if ngram:
        status["ngram"] = {"rows": 16 * tokens, "hits": 12 * tokens}
    return json.dumps({"result": None, "status": status})


def test_bytes_a_second_are_bytes_a_token_times_tokens_a_second() -> None:
    with fake_server() as fake:
        # All hits in the calibration and the warm-up, then three quarters.
        fake.pages["/q38/residency"] = lambda: residency(
            10 * len(fake.requests), (30 + 7.5 * (len(fake.requests) - 3)) / (10 * len(fake.requests))
        )
        fake.script = lambda body: answer(["a", "b", "c"], body, between=0.002)
        plan = Plan((64,), (1, 2), prefixes=("cold",), max_tokens=3, repeats=2, max_warmup=1)
        cells = bench_serve(fake.url, plan)["cells"]
    for cell in cells:
        together = cell["decode_tokens_per_s"] * cell["concurrency"]
        assert cell["server"]["expert_hit_rate"] == pytest.approx(0.75)
        assert cell["server"]["ngram_hit_rate"] == pytest.approx(0.75)
        assert cell["server"]["host_link_gb_per_s"] == pytest.approx(3e-3 * together)
        assert cell["server"]["gpu_expert_gb_per_s"] == pytest.approx(12e-3 * together)


@pytest.mark.parametrize("text", ["", "{}", "[]", "no", '{"status": null}', '{"status": {"traffic": {}}}'])
def test_a_page_that_is_something_else_counts_nothing(text: str) -> None:
    assert parse_residency(text) == {}


def test_nothing_decoded_yet_and_no_table_are_no_fault() -> None:
    counted = parse_residency(residency(0, None, ngram=False))
    assert set(counted) == {"q38:decode_tokens", "q38:decode_hits", "q38:host_bytes", "q38:device_bytes"}
    assert server_figures(counted, 50.0) == {}


@pytest.mark.parametrize(
    ("path", "document", "expected"),
    [
        (
            "/get_server_info",
            {"version": "0.5.23", "kv_cache_dtype": "auto", "api_key": "secret", "model_path": "/home/me"},
            {"version": "0.5.23", "kv_cache_dtype": "auto"},
        ),
        ("/version", {"version": "0.19.0"}, {"version": "0.19.0"}),
        ("/props", {"build_info": "b1234", "model_path": "/home/me"}, {"build_info": "b1234"}),
        ("/version", [], {}),
    ],
    ids=["sglang", "vllm", "llama.cpp", "nonsense"],
)
def test_versions_are_learned_and_nothing_private(path: str, document: Any, expected: dict[str, str]) -> None:
    with fake_server() as fake:
        from q38.serving.client import Client

        fake.pages[path] = lambda: json.dumps(document)
        with Client(fake.url) as client:
            assert Target.open(client, None).describe()["reports"] == expected
