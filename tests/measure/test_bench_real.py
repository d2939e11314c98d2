"""The benchmark against the real server with the quantized tiny model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from q38.measure.bench.plan import Plan
from q38.measure.bench.report import html_report
from q38.measure.bench.run import bench_serve
from tests.measure.pages import check_page

if TYPE_CHECKING:
    from q38.serving.launch import Server


def test_a_real_server_is_measured(tiny_server: Server, tiny_quantized: Path) -> None:
    plan = Plan((64, 200), (1, 2), max_tokens=4, repeats=1, max_warmup=2)
    result = bench_serve(tiny_server.url, plan)
    assert result["complete"]
    assert [(c["depth"], c["concurrency"], c["prefix"]) for c in result["cells"]] == [
        (depth, n, prefix) for depth in (64, 200) for n, prefix in ((1, "cold"), (1, "warm"), (2, "cold"))
    ]
    for cell in result["cells"]:
        assert abs(cell["prompt_tokens"] - cell["depth"]) <= 0.25 * cell["depth"]
        assert cell["completion_tokens"] == 4
        assert 0 < cell["first_token_s"]["p50"] <= cell["last_token_s"]["p50"]
        assert cell["output_tokens_per_s"] > 0
    server = result["server"]
    assert (server["model"], server["engine"]) == ("tiny", "transformers")
    config = hashlib.sha256((tiny_quantized / "config.json").read_bytes()).hexdigest()
    assert server["files"]["config.json"] == config
    assert result["settings"]["ignore_eos"] is True
    check_page(html_report(result, {}))
