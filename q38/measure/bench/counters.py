"""What a server counts while it is measured, where it offers it.

GET /metrics (SGLang, vLLM) is Prometheus text; GET /q38/residency (q38's sglang engine) has the expert rows and n-gram rows that
were read. Of both, the rise over a cell's rounds counts. A server with neither is measured all the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from q38.measure.bench.target import Target

# (prompt tokens found in the prefix cache, prompt tokens looked up), by server.
_PREFIX = (
    ("sglang:cached_tokens_total", "sglang:prompt_tokens_total"),
    ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total"),
)
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+(\S+)", re.MULTILINE)


def read_counters(target: Target) -> dict[str, float]:
    """All counters of a server by name; empty where it has none."""
    rows = parse_residency(target.client.text("/q38/residency") or "")
    return {**parse_metrics(target.client.text("/metrics") or ""), **rows}


def parse_metrics(text: str) -> dict[str, float]:
    """Values of the Prometheus text format, summed over labels
    (https://prometheus.io/docs/instrumenting/exposition_formats/)."""
    totals: dict[str, float] = {}
    for name, value in _SAMPLE.findall(text):
        try:
            totals[name] = totals.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return totals


def parse_residency(text: str) -> dict[str, float]:
    """Counters of the status of q38's expert rows: of decode steps, and of the n-gram table."""
    try:
        status = json.loads(text)["status"]
        decode, ngram = status["traffic"]["decode"], status.get("ngram")
        found = {
            "q38:decode_tokens": decode["tokens"],
            "q38:decode_hits": decode["tokens"] * (decode["hit_rate"] or 0.0),
            "q38:host_bytes": decode["host_bytes"],
            "q38:device_bytes": decode["device_bytes"],
        }
        return found | ({"q38:ngram_rows": ngram["rows"], "q38:ngram_hits": ngram["hits"]} if ngram else {})
    except (ValueError, KeyError, TypeError):
        return {}


def server_figures(counted: Mapping[str, float], output_tokens_per_s: float | None) -> dict[str, Any]:
    """The server's own figures of a cell, without those it does not offer.

    prefix_hit_rate: prompt tokens found in the prefix cache / prompt tokens.
    expert_hit_rate: share of the experts chosen in decode steps whose rows lay in GPU memory.
    host_link_gb_per_s, gpu_expert_gb_per_s: bytes of expert rows that decode steps read over the link and from GPU
        memory, per token, times the tokens/s of all requests.
    ngram_hit_rate: share of the rows of the n-gram table that were not read from disk.

    Args:
        counted: by how much each counter rose over the cell.
        output_tokens_per_s: decode tokens/s of one request times the requests at once.
    """
    result: dict[str, Any] = {}

    def share(name: str, part: str, whole: str) -> None:
        if part in counted and counted.get(whole, 0) > 0:
            result[name] = counted[part] / counted[whole]

    for hits, lookups in _PREFIX:
        share("prefix_hit_rate", hits, lookups)
    share("expert_hit_rate", "q38:decode_hits", "q38:decode_tokens")
    share("ngram_hit_rate", "q38:ngram_hits", "q38:ngram_rows")
    tokens = counted.get("q38:decode_tokens", 0)
    if tokens > 0 and output_tokens_per_s is not None:
        for name, nbytes in (
            ("host_link_gb_per_s", "q38:host_bytes"),
            ("gpu_expert_gb_per_s", "q38:device_bytes"),
        ):
            result[name] = counted[nbytes] / tokens * output_tokens_per_s / 1e9
    return result
