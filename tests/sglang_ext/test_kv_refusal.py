"""A KV cache without memory in the real SGLang engine on the CPU: who is refused, with what, and who goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings
from tests.sglang_ext.conftest import missing

if TYPE_CHECKING:
    from q38.serving.launch import Server

LIMIT = 600_000  # 15 pages of 64 tokens, 36 KiB each; the pool has 36


@pytest.fixture(scope="module")
def server(tiny_packed: Path, tiny_ple: Path) -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    settings = SglangSettings(device="cpu", context=1024, requests=2, chunk=128, kv="int4", kv_limit=LIMIT)
    with running_server(tiny_packed, ple=tiny_ple, name="tiny", engine="sglang", sglang=settings) as running:
        yield running


def body(tokens: int, *, new: int = 4, seed: int = 0) -> dict[str, Any]:
    ids = [5 + (7 * i + seed) % 900 for i in range(tokens)]
    return {"model": "tiny", "prompt": ids, "max_tokens": new, "ignore_eos": True, "temperature": 0}


def ask(server: Server, tokens: int, *, new: int = 4, seed: int = 0) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=body(tokens, new=new, seed=seed), timeout=180)


def test_a_prompt_beyond_the_memory_gets_400_and_what_would_fit(server: Server) -> None:
    answer = ask(server, 1000)
    assert answer.status_code == 400
    message = answer.json()["message"]
    assert "1000 tokens of KV cache do not fit" in message
    fits = int(message.split("; ")[1].split(" ")[0])
    assert 640 < fits < 1000
    assert ask(server, fits).status_code == 200
    assert ask(server, fits + 64).status_code == 400


def test_memory_that_ends_in_mid_prefill_ends_that_request_alone(server: Server) -> None:
    long_answer = {**body(256, new=300), "stream": True}  # 4 pages, then up to 9
    with httpx.stream("POST", f"{server.url}/v1/completions", json=long_answer, timeout=180) as other:
        pieces = other.iter_lines()
        assert next(pieces).startswith("data: ")  # it runs
        answer = ask(server, 800, seed=3)  # 13 pages
        assert answer.status_code == 503
        message = answer.json()["message"]
        assert "of 800 tokens of the prompt" in message
        done = int(message.split(" after ")[1].split(" ")[0])
        assert 128 <= done < 800  # some steps had their memory
        rest = [line for line in pieces if line]
    assert rest[-1] == "data: [DONE]"
    assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert ask(server, 800, seed=3).status_code == 200  # alone it fits


def test_an_answer_that_outgrows_the_memory_ends_with_503(server: Server) -> None:
    answer = ask(server, 640, new=380)  # 10 pages, then up to 16
    assert answer.status_code == 503
    message = answer.json()["message"]
    assert "no memory for the KV cache after" in message and "tokens of prompt and answer" in message
    assert 896 <= int(message.split(" after ")[1].split(" ")[0]) < 1020  # 14 pages and more
    assert ask(server, 640).status_code == 200
