"""What the counters come to: hits by where a row lay when it was read, bytes over the link, Prometheus' text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.checkpoint.index import Checkpoint
from q38.kernels.expert_counter import ExpertCounter
from q38.sglang_ext.metrics import prometheus
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows


@given(steps=st.lists(st.lists(st.integers(-1, 7), min_size=1, max_size=12), min_size=1, max_size=5))
def test_selections_are_counted_and_each_row_is_read_once_a_step(steps: list[list[int]]) -> None:
    counter = ExpertCounter(2, 8, "cpu")
    for ids in steps:
        counter.add(1, torch.tensor(ids, dtype=torch.int32))
    selections, reads = counter.read()
    assert not selections[0].any()
    assert selections[1].tolist() == [sum(ids.count(e) for ids in steps) for e in range(8)]
    assert reads[1].tolist() == [sum(e in ids for ids in steps) for e in range(8)]


@pytest.fixture
def rows(tiny_packed: Path) -> Any:
    options = ExtensionOptions(str(tiny_packed), device_rows=32, fewest_device_rows=16, spare=4)
    opened = ExpertRows(Checkpoint.open(tiny_packed), options, torch.device("cpu"))
    yield opened
    opened.cache.close()


def ids(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.int32)


def test_hits_and_bytes_follow_where_the_rows_lie(rows: ExpertRows) -> None:
    hot, cold = np.flatnonzero(rows.cache.resident[0]), np.flatnonzero(~rows.cache.resident[0])
    if not len(cold):  # the resident rows are the first ones of all layers
        hot, cold = np.array([], int), np.flatnonzero(~rows.cache.resident[3])
    layer = 0 if len(hot) else 3
    rows.traffic.add("decode", layer, ids(*cold[:2].tolist(), *cold[:2].tolist()))
    found = rows.status()["traffic"]["decode"]
    assert found["hit_rate"] == 0.0
    assert found["host_bytes"] == 2 * rows.layout.row_bytes  # two rows, chosen twice
    assert found["device_bytes"] == 0
    assert rows.status()["traffic"]["prefill"]["hit_rate"] is None


def test_staged_rows_cross_the_link_whether_chosen_or_not(rows: ExpertRows) -> None:
    layer, hot = (int(n) for n in np.argwhere(rows.cache.resident)[0])
    rows.traffic.add("prefill", layer, ids(hot))
    rows.traffic.add_staged(3, ids(*np.flatnonzero(~rows.cache.resident[3])[:2].tolist()), 9)
    rows.traffic.add_staged(layer, ids(hot, hot), 0)
    found = rows.status()["traffic"]["prefill"]
    assert found["staged_bytes"] == found["host_bytes"] == 9 * rows.layout.row_bytes
    assert found["device_bytes"] == 2 * rows.layout.row_bytes
    assert found["hit_rate"] == 3 / 5
    assert found["tokens"] == round(5 / 16)
    assert rows.traffic.counts.sum() == 5


def test_reads_before_a_move_are_charged_to_the_old_place(rows: ExpertRows) -> None:
    from q38.sglang_ext.control import handle

    layer, expert = np.argwhere(rows.cache.resident)[-1]  # of equal heat the last goes first
    rows.traffic.add("decode", int(layer), ids(int(expert)))
    assert "error" not in handle(rows, b'{"action": "shrink", "rows": 16}')
    assert not rows.cache.resident[layer, expert]
    rows.traffic.add("decode", int(layer), ids(int(expert)))
    found = rows.status()["traffic"]["decode"]
    assert found["hit_rate"] == 0.5
    assert found["host_bytes"] == found["device_bytes"] == rows.layout.row_bytes


def test_counts_go_on_across_a_wrap_around(rows: ExpertRows) -> None:
    counter = rows.traffic._counters["decode"]
    counter.counts.fill_(-1)  # 2^32 - 1
    rows.traffic.collect()
    before = rows.traffic.totals["decode"].selections
    rows.traffic.add("decode", 0, ids(0, 1))
    rows.traffic.collect()
    assert rows.traffic.totals["decode"].selections - before == 2


def test_prometheus_reads_the_metrics(rows: ExpertRows) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    rows.others["ngram"] = lambda: {"rows": 7, "hits": 3, "ahead": 1, "wait_s": 0.25}
    rows.others["kv"] = lambda: {"used": 5, "total": 64}
    rows.traffic.add("prefill", 0, ids(1, 2))
    text = prometheus(rows.status())
    found = {f.name: f for f in text_string_to_metric_families(text)}
    assert found["q38_ngram_wait_seconds"].samples[0].value == 0.25
    assert found["q38_kv_tokens"].samples[0].value == 5
    assert {s.labels["phase"] for s in found["q38_expert_hit_rate"].samples} == {"prefill"}
    assert re.search(r"^# TYPE q38_link_bytes_total counter$", text, re.MULTILINE)
