"""The table of a trace: benchmarks/serve_profile.py."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_profile import comparison, group_of, read_trace, summarize, table


def event(name: str, start: float, duration: float, kind: str = "kernel", **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": duration, **more}


def test_overlaps_gaps_and_copies_are_told_apart(tmp_path: Path) -> None:
    events = [
        event("void q38_gate_up<1>(int)", 0, 10),
        event("gemv", 5, 10),
        event("gemv", 300, 5),
        event("Memcpy HtoD", 8, 100, "gpu_memcpy", args={"bytes": 5_000_000}),
        event("aten::mm", 0, 1000, "cpu_op"),
        {"ph": "i", "name": "a mark", "ts": 1},
    ]
    file = tmp_path / "x.trace.json.gz"
    file.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    found = read_trace(file, 2)
    assert found.kernels == {"void q38_gate_up<1>(int)": (1, 10), "gemv": (2, 15)}
    assert (found.busy, found.copying, found.both, found.span, found.gaps) == (20, 100, 113, 305, [285])
    text = table(found)
    assert "per step: 2 kernels, busy 0.010 ms of 0.152 ms" in text
    assert "50 us, 2.50 MB, of these 46 us while no kernel ran" in text


def test_a_trace_without_kernels_tells_its_operators(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"traceEvents": [event("aten::mm", 0, 7, "cpu_op")]}))
    assert read_trace(file, 1).kernels == {"aten::mm": (1, 7)}


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void grouped<8, 4>(unsigned long)", "experts"),
        ("q38_gemv_int8", "INT8 projections"),
        ("hc_combine_kernel", "hyper-connections"),
        ("nvjet_tst_64x8", "dense products"),
        ("something", "other"),
    ],
)
def test_kernels_belong_to_groups(name: str, group: str) -> None:
    assert group_of(name) == group


def test_two_profiles_are_compared_by_group_and_kernel() -> None:
    fast = summarize([event("gemv", 0, 10), event("topk", 20, 4)], [], 2)
    slow = summarize([event("gemv", 0, 20), event("topk", 30, 4)], [], 2)
    text = comparison(fast, slow)
    assert "| gemv | 5.000 | 10.000 | 2.00 |" in text
    assert "| topk | 2.000 | 2.000 | 1.00 |" in text
    assert "| INT8 projections | 0.005 | 0.010 | 2.00 |" in text
