"""A quantized KV cache in the real SGLang engine on the CPU: prefixes are reused, memory follows the pages."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch

from q38.measure.oracle_kv import KvOptions, Scorer, measure, real_servers
from q38.measure.oracle_sglang import SglangEngine
from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings
from tests.sglang_ext.conftest import missing

if TYPE_CHECKING:
    from q38.serving.launch import Server

PROMPTS = Path(__file__).parents[2] / "assets" / "prompts"
CONTEXT, PAGE = 512, 64
SAME = 0.005  # nats: a prefix hit rounds otherwise by up to 0.002, rows of others in the ring move it by 0.01


@pytest.fixture(scope="module")
def server(tiny_packed: Path, tiny_ple: Path) -> Iterator[Server]:
    """The default quantized format, with a ring shorter than the prompts, and the prefix cache."""
    if why := missing():
        pytest.skip(why)
    settings = SglangSettings(
        device="cpu",
        context=CONTEXT,
        requests=2,
        chunk=128,
        kv="int8ring_int4",
        kv_ring=128,
        prefix_cache=True,
    )
    with running_server(tiny_packed, ple=tiny_ple, name="tiny", engine="sglang", sglang=settings) as running:
        yield running


@pytest.fixture(scope="module")
def texts(tiny_packed: Path) -> list[list[int]]:
    """Token ids of five texts, long enough for several chunks."""
    from q38.hf.load import load_tokenizer

    tokenizer = load_tokenizer(tiny_packed)
    files = ("prose.en.txt", "prose.de.txt", "prose.fr.txt", "prose.es.txt", "code.txt")
    return [tokenizer((PROMPTS / name).read_text())["input_ids"][:330] for name in files]


def ask(server: Server, ids: list[int], *, scored_from: int | None = None, new: int = 2) -> dict[str, Any]:
    """Greedy tokens, and log-probabilities of the prompt's tokens from a position on."""
    body = {
        "input_ids": ids,
        "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": len(ids) - 1 if scored_from is None else scored_from,
    }
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=180)
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def scores(answer: dict[str, Any], count: int, *, new: int = 1) -> torch.Tensor:
    """The last `count` log-probabilities of the prompt, and those of the first `new` tokens that were generated.

    Not of all: where two tokens are nearly alike, rounding decides which answer it becomes.
    """
    meta = answer["meta_info"]
    prompt = [entry[0] for entry in meta["input_token_logprobs"]]
    prompt = prompt[len(prompt) - count :]
    return torch.tensor(prompt + [entry[0] for entry in meta["output_token_logprobs"][:new]])


def same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Two answers to a prompt of which the last 40 tokens were scored agree up to what a prefix hit rounds otherwise."""
    apart = (scores(one, 39) - scores(other, 39)).abs().mean()
    print(f"mean |d| {apart:.5f} nats")
    assert apart <= SAME


def forget(server: Server) -> None:
    """Empty the prefix cache."""
    assert httpx.post(f"{server.url}/flush_cache", timeout=60).status_code == 200


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_a_turn_with_a_prefix_hit_scores_as_one_without(server: Server, texts: list[list[int]]) -> None:
    forget(server)
    # Prefill steps of 192 and 88 tokens: the state at 256 is one from inside a step.
    first, more = texts[0][:280], texts[0][280:]
    opened = ask(server, first, new=6)
    assert opened["meta_info"]["cached_tokens"] == 0
    turn = first + opened["output_ids"] + more
    start = len(turn) - len(more)
    hit = ask(server, turn, scored_from=start, new=4)
    assert hit["meta_info"]["cached_tokens"] >= 2 * PAGE
    forget(server)
    fresh = ask(server, turn, scored_from=start, new=4)
    assert fresh["meta_info"]["cached_tokens"] == 0
    forget(server)
    ask(server, texts[1])  # takes the pages and the ring's places that the prompt had
    forget(server)
    again = ask(server, turn, scored_from=start, new=4)
    count = len(more) - 1
    alone, later, cached = (scores(answer, count, new=4) for answer in (fresh, again, hit))
    noise = (alone - later).abs().mean()
    apart = (alone - cached).abs().mean()
    print(f"mean |d| of a prefix hit {apart:.5f} nats, noise {noise:.5f}")
    assert apart <= noise + 1e-4  # a snapshot of zeros moves it by 6e-4


def test_four_conversations_take_turns_and_each_finds_its_own_prefix(
    server: Server, texts: list[list[int]]
) -> None:
    forget(server)
    first = [ask(server, ids[:200], new=4) for ids in texts[:4]]
    turns = [
        ids[:200] + answer["output_ids"] + ids[200:260] for ids, answer in zip(texts, first, strict=False)
    ]
    second = [ask(server, ids, scored_from=len(ids) - 40) for ids in turns]
    assert all(answer["meta_info"]["cached_tokens"] >= PAGE for answer in second)
    for ids, answer in zip(turns, second, strict=True):
        forget(server)
        alone = ask(server, ids, scored_from=len(ids) - 40)
        same(answer, alone)


def test_more_conversations_than_fit_evict_and_corrupt_none(server: Server, texts: list[list[int]]) -> None:
    """Seven conversations alternate in a pool of 20 pages, of which each leaves three full ones."""
    forget(server)
    prompts = [texts[i % 5][i : i + 200] for i in range(7)]
    first = [ask(server, ids, scored_from=160) for ids in prompts]
    places = [6, 5, 0, 1]  # the newest two are kept, and the oldest two are not
    second = [ask(server, prompts[place], scored_from=160) for place in places]
    assert [answer["meta_info"]["cached_tokens"] > 0 for answer in second] == [True, True, False, False]
    for place, answer in zip(places, second, strict=True):
        same(first[place], answer)


@pytest.mark.parametrize("tokens", [1, 64, 65])
def test_a_prompt_of_a_page_and_around_it_is_answered(
    server: Server, texts: list[list[int]], tokens: int
) -> None:
    answer = ask(server, texts[4][:tokens], scored_from=0, new=2)
    found = scores(answer, tokens - 1, new=2)
    assert len(found) == tokens + 1
    assert torch.isfinite(found).all()


def test_a_prompt_one_token_over_the_limit_is_refused_and_the_next_is_served(
    server: Server, texts: list[list[int]]
) -> None:
    body = {"input_ids": [5] * (CONTEXT + 1), "sampling_params": {"max_new_tokens": 1}}
    answer = httpx.post(f"{server.url}/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert str(CONTEXT) in answer.text
    assert ask(server, texts[0][:10])["output_ids"]


def test_memory_comes_with_the_pages_and_goes_when_they_are_free(
    server: Server, texts: list[list[int]]
) -> None:
    def mapped() -> int:
        figures = httpx.get(f"{server.url}/q38/residency", timeout=60).json()["status"]["kv_memory"]
        assert (figures["format"], figures["tokens"]) == ("int8ring_int4", 1280)
        return int(figures["mapped_bytes"])

    forget(server)
    ask(server, texts[2])
    full = mapped()  # its prefix is kept
    forget(server)
    ask(server, texts[3][:8])
    wait_until(lambda: mapped() < full)  # given back once the scheduler has nothing to do
    log = server.log.read_text()
    assert "KV cache in int8ring_int4, 576 bytes a token, 1280 tokens, ring of 128" in log
    assert re.search(r"q38: [\d.]+ [KM]iB of KV cache are back with the driver", log)


@contextmanager
def at_once(servers: list[AbstractContextManager[Scorer]]) -> Iterator[list[Scorer]]:
    """Starts servers side by side, and stops them so: most of a start is one thread of Python."""
    over = threading.Event()
    ready: list[Future[Scorer]] = [Future() for _ in servers]

    def run(server: AbstractContextManager[Scorer], started: Future[Scorer]) -> None:
        try:
            with server as scorer:
                started.set_result(scorer)
                over.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)

    with ThreadPoolExecutor(len(servers)) as pool:
        ends = [pool.submit(run, *pair) for pair in zip(servers, ready, strict=True)]
        try:
            yield [started.result() for started in ready]
        finally:
            over.set()
    for end in ends:
        end.result()


@pytest.mark.slow
def test_the_error_of_a_format_is_measured_between_no_noise_and_a_cache_of_zeros(
    server: Server, tiny_packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    """The order of the formats is tested without servers, in test_kv_hooks.py."""
    options = KvOptions(
        formats=("int8ring_int4",),
        tokens=288,
        chunk=128,
        ring=128,
        device="cpu",
        needles=(192,),
        depths=(0.5,),
    )
    real = real_servers(tiny_packed, tiny_ple, options)
    forget(server)
    out = tmp_path / "kv.json"
    with (
        SglangEngine(server.url, tiny_packed) as ring,
        at_once([real("bf16", False), real("int8ring_int4", True)]) as (plain, zeros),
    ):
        running = {("bf16", False): plain, ("int8ring_int4", False): ring, ("int8ring_int4", True): zeros}
        result = measure(
            tiny_packed, out, options=options, servers=lambda name, zeroed: nullcontext(running[name, zeroed])
        )
    assert result["positions"] == 160
    found = result["formats"]["int8ring_int4"]
    assert result["noise"]["mean_abs"] < found["mean_abs"] < result["control"]["mean_abs"]
    assert found["bytes_per_token"] == 576 + 64 + 1056 * 128 / 288
    (cell,) = result["needles"]["cells"]
    assert (
        0
        <= abs(cell["int8ring_int4"]["nll"] - cell["bf16"]["nll"])
        < abs(cell["zeros"]["nll"] - cell["bf16"]["nll"])
    )
    assert out.with_suffix(".svg").read_text().startswith("<svg")
    assert measure(tiny_packed, out, options=options) == result  # nothing is started again
