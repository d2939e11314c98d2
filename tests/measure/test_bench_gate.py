"""A slowdown behind the client's back is found, an equal server is left alone.

Injected delays are far above the machine's timer: 20 ms a token and 30 % more, so that a busy machine does not decide.
The finer gate, 5 % in 20 trials of 20, is benchmarks/bench_gate.py (docs/bench.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.bench_gate_servers import proxy, steady_server
from q38.measure.bench.compare import SLOWER
from q38.measure.bench.plan import Plan
from q38.measure.bench.run import bench_serve

PLAN = Plan((100,), prefixes=("cold",), max_tokens=8, repeats=10, max_warmup=1)


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[str, str, str]]:
    """The same server: as it is, as it is again, and 30 % slower."""
    with (
        steady_server(0.05, 0.02) as server,
        proxy(server, stretch=1.0) as one,
        proxy(server, stretch=1.0) as two,
        proxy(server, stretch=1.3) as slow,
    ):
        yield one, two, slow


def verdicts(result: dict[str, Any]) -> dict[str, str]:
    return {row["speed"]: row["verdict"] for row in result["comparison"]["rows"]}


def test_in_turns_the_slower_server_is_found_and_the_equal_one_is_not(servers: tuple[str, str, str]) -> None:
    one, two, slow = servers
    found = bench_serve(slow, PLAN, against=one, gate=0.9)
    assert found["comparison"]["verdict"] == SLOWER
    assert verdicts(found)["decode"] == SLOWER
    assert found["comparison"]["paired"] is True
    assert found["rival"]["server"]["url"] == one
    equal = bench_serve(two, PLAN, against=one, gate=0.9)
    assert equal["comparison"]["verdict"] != SLOWER
