"""A server that exchanges rows by what is read: which rows, what the counters then say, and that answers stay the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.residency.driver import CudaError
from q38.residency.profile import Profile, save
from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings
from q38.sglang_ext import residency
from q38.sglang_ext.kv_lender import ExpertLender
from q38.sglang_ext.metrics import prometheus
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows

STEPS = 400


@pytest.fixture
def rows(tiny_packed: Path) -> Iterator[ExpertRows]:
    options = ExtensionOptions(str(tiny_packed), device_rows=32, fewest_device_rows=16, spare=4, adapt=True)
    opened = ExpertRows(Checkpoint.open(tiny_packed), options, torch.device("cpu"))
    yield opened
    opened.cache.close()


def decode(rows: ExpertRows, chosen: dict[int, list[int]], count: int = STEPS) -> None:
    """Steps of one token that choose the same experts."""
    for _ in range(count):
        for layer, experts in chosen.items():
            rows.traffic.add("decode", layer, torch.tensor([experts], dtype=torch.int32))
        rows.adapt(1)


def on_the_host(rows: ExpertRows, each: int) -> dict[int, list[int]]:
    cold = {layer: np.flatnonzero(~found)[:each].tolist() for layer, found in enumerate(rows.cache.resident)}
    return {layer: found for layer, found in cold.items() if len(found) == each}


def test_rows_that_are_read_come_to_the_device_and_their_number_stays(rows: ExpertRows) -> None:
    chosen, before = on_the_host(rows, rows.top_k), int(rows.cache.resident.sum())
    assert len(chosen) > 1
    decode(rows, chosen)
    rows.cache.store.settle()
    assert all(rows.cache.resident[layer, experts].all() for layer, experts in chosen.items())
    assert rows.cache.resident.sum() == before
    status = rows.status()
    assert status["rows_exchanged"] >= 2 * rows.top_k * len(chosen)
    assert f"q38_expert_rows_exchanged_total {status['rows_exchanged']}\n" in prometheus(status)


def test_reads_are_charged_to_where_a_row_lay(rows: ExpertRows) -> None:
    """Nearly all of them came after the rows; charged to where they lie at the end, it would be all."""
    chosen = on_the_host(rows, rows.top_k)
    decode(rows, chosen)
    found = rows.status()["traffic"]["decode"]
    selected = STEPS * rows.top_k * len(chosen)
    assert rows.traffic.counts.sum() == selected
    assert 0.5 < found["hit_rate"] < 1


def test_a_reading_that_waits_and_one_that_does_not_count_nothing_twice(rows: ExpertRows) -> None:
    rows.traffic.add("decode", 0, torch.tensor([[0, 1]], dtype=torch.int32))
    rows.traffic.request()
    rows.traffic.add("decode", 0, torch.tensor([[0, 1]], dtype=torch.int32))
    rows.traffic.collect()
    assert not rows.traffic.arrived()
    rows.traffic.request()
    assert rows.traffic.arrived()
    assert rows.traffic.counts.sum() == 4


def test_without_a_profile_every_layer_starts_with_as_many(rows: ExpertRows) -> None:
    assert np.ptp(rows.cache.budgets) <= 1
    rows.cache.shrink(8)
    assert np.ptp(rows.cache.budgets) <= 1


def test_another_profile_is_worth_as_much_as_one_from_the_start(rows: ExpertRows, tmp_path: Path) -> None:
    assert rows.adapter is not None
    assert rows.adapter.tracker.prior_tokens < 100
    count = np.ones((rows.cache.layers, rows.cache.experts), np.int64)
    count[:, -1] = 1000
    file = tmp_path / "p.safetensors"
    save(Profile(count, count.astype(np.float64), 1000), file)
    rows.place_by(file)
    assert rows.adapter.tracker.prior_tokens > 1000
    assert rows.adapter.tracker.rates()[:, -1].min() > rows.adapter.tracker.rates()[:, :-1].max()


def test_without_it_rows_stay(tiny_packed: Path) -> None:
    options = ExtensionOptions(str(tiny_packed), device_rows=32, fewest_device_rows=16, spare=4)
    opened = ExpertRows(Checkpoint.open(tiny_packed), options, torch.device("cpu"))
    before = opened.cache.resident.copy()
    decode(opened, on_the_host(opened, opened.top_k), 50)
    assert (opened.cache.resident == before).all()
    assert opened.status()["rows_exchanged"] is None
    assert "exchanged" not in prometheus(opened.status())
    opened.cache.close()


def test_a_driver_that_fails_ends_the_exchanges_and_no_step(
    rows: ExpertRows, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise CudaError("cuMemcpyBatchAsync", 1, "invalid argument")

    monkeypatch.setattr(rows.cache.store.driver, "copy", fail)
    with caplog.at_level(logging.WARNING):
        decode(rows, on_the_host(rows, rows.top_k), 50)
    assert rows.adapter is None
    assert rows.status()["rows_exchanged"] == 0
    assert sum("by request only from now on" in line for line in caplog.messages) == 1


def test_an_exchange_under_way_takes_nothing_from_what_the_kv_cache_may_have(
    rows: ExpertRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "_rows", rows)
    lender, before = ExpertLender(0), ExpertLender(0).available()
    assert before > 0
    hottest, coldest = (
        np.flatnonzero(~rows.cache.store.on_device)[:3],
        np.flatnonzero(rows.cache.store.on_device)[:3],
    )
    assert rows.cache.begin_swaps(hottest, coldest) == 3
    assert lender.available() == before
    rows.cache.store.settle()
    assert lender.available() == before


def test_answers_stay_the_same_while_rows_follow_the_traffic(tiny_packed: Path, tiny_ple: Path) -> None:
    """The real engine: the same prompts scored before and after many exchanges."""
    prompts = [list(range(first, first + 40)) for first in (10, 300, 700)]
    settings = SglangSettings(device="cpu", context=512, adapt=True)

    def score(server: Any) -> list[list[float]]:
        body = {"input_ids": prompts, "return_logprob": True, "logprob_start_len": 0}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        answers = httpx.post(f"{server.url}/generate", json=body, timeout=300).raise_for_status().json()
        return [[entry[0] for entry in a["meta_info"]["input_token_logprobs"][1:]] for a in answers]

    def status(server: Any) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{server.url}/q38/residency").raise_for_status().json()["status"]
        return found

    with running_server(tiny_packed, ple=tiny_ple, engine="sglang", sglang=settings) as server:
        to_host = {"action": "shrink", "rows": 32}
        httpx.post(f"{server.url}/q38/residency", json=to_host).raise_for_status()
        first, began = score(server), status(server)
        for _ in range(4):
            assert score(server) == first
        after = status(server)
    assert after["rows_exchanged"] > began["rows_exchanged"]
    assert after["rows_on_device"] == began["rows_on_device"] == began["rows_on_host"]
    assert after["expected_hit_rate"] > 0.5  # the half in device memory is the half that is read more
