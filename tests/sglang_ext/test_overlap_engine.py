"""Overlapped steps in the real SGLang engine on the CPU: the same answers, and no token from rows that could not be read."""

from __future__ import annotations

import concurrent.futures
import json
import random
import shutil
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

CHUNK = 64
RANDOM = random.Random(3)
# One token, part of a chunk, three chunks, whole chunks.
PROMPTS = [[RANDOM.randrange(10, 1990) for _ in range(n)] for n in (1, 40, 150, 2 * CHUNK)]


def answer(server: Server, ids: list[int], tokens: int = 12) -> tuple[list[int], list[float]]:
    """Token ids and their log-probabilities."""
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True}
    document: dict[str, Any] = (
        httpx.post(f"{server.url}/generate", json=body, timeout=120).raise_for_status().json()
    )
    return document["output_ids"], [entry[0] for entry in document["meta_info"]["output_token_logprobs"]]


def answers(server: Server) -> list[tuple[list[int], list[float]]]:
    """One after the other, all at once (two run, two wait), and once more after a client has left."""
    alone = [answer(server, ids) for ids in PROMPTS]
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(lambda ids: answer(server, ids), PROMPTS))
    body = {"input_ids": PROMPTS[1], "sampling_params": {"max_new_tokens": 200}, "stream": True}
    with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60) as left:
        next(left.iter_lines())
    return [*alone, *together, answer(server, PROMPTS[2])]


@pytest.fixture(scope="module")
def ple(tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table to be broken."""
    return Path(shutil.copytree(tiny_ple, tmp_path_factory.mktemp("overlap") / "ple"))


@pytest.fixture(scope="module")
def overlapped(tiny_packed: Path, ple: Path) -> Iterator[Server]:
    if why := missing():
        pytest.skip(why)
    settings = SglangSettings(device="cpu", context=512, requests=2, chunk=CHUNK, check_finite=True)
    with running_server(tiny_packed, ple=ple, name="tiny", engine="sglang", sglang=settings) as server:
        yield server


def test_answers_are_those_of_steps_one_by_one(overlapped: Server, tiny_packed: Path, ple: Path) -> None:
    """Decoded tokens come from the device, prompts from the host; nothing may differ."""
    found = answers(overlapped)
    assert "rows are read inside it" in overlapped.log.read_text()
    settings = SglangSettings(device="cpu", context=512, requests=2, chunk=CHUNK, overlap=False)
    with running_server(tiny_packed, ple=ple, name="tiny", engine="sglang", sglang=settings) as server:
        expected = answers(server)
        assert "rows are read before it" in server.log.read_text()
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    assert [p for _, ps in found for p in ps] == pytest.approx(
        [p for _, ps in expected for p in ps], abs=0.05
    )


def test_every_prompt_step_was_looked_at_and_was_finite(overlapped: Server) -> None:
    before = finite(overlapped)["prompt_steps"]
    answer(overlapped, PROMPTS[2], 1)
    after = finite(overlapped)
    assert after["prompt_steps"] - before == -(-len(PROMPTS[2]) // CHUNK)
    assert after["first"] is None


def finite(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = httpx.get(f"{server.url}/q38/residency", timeout=60).json()["status"]["finite"]
    return found


def test_rows_that_cannot_be_read_end_the_server_with_the_reason(overlapped: Server, ple: Path) -> None:
    """Breaks the table, so this test comes last."""
    prompt = [7, 8, 9]
    answer(overlapped, prompt, 1)  # its own rows are cached from here on
    table = ple / json.loads((ple / "ple.json").read_text())["file"]
    with table.open("r+b") as file:
        file.truncate(16)
    with pytest.raises(httpx.HTTPError):
        answer(overlapped, prompt, 100)
    assert "cannot be read: the file ends before it" in overlapped.log.read_text()
