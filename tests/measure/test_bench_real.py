"""The benchmark against the real server with the quantized tiny model."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from q38.measure.bench import bench_serve

if TYPE_CHECKING:
    from q38.serving.launch import Server


def test_a_real_server_is_measured(tiny_server: Server, tiny_quantized: Path) -> None:
    result = bench_serve(tiny_server.url, contexts=[64, 200], max_tokens=4, repeats=1)
    for cell in result["contexts"]:
        assert abs(cell["prompt_tokens"] - cell["context"]) <= 0.25 * cell["context"]
        assert cell["runs"][0]["completion_tokens"] == 4
        assert cell["prefill_tokens_per_s"] > 0
        assert cell["decode_tokens_per_s"] > 0
    server = result["server"]
    assert (server["model"], server["engine"]) == ("tiny", "transformers")
    config = hashlib.sha256((tiny_quantized / "config.json").read_bytes()).hexdigest()
    assert server["files"]["config.json"] == config
    assert result["settings"]["ignore_eos"] is True
