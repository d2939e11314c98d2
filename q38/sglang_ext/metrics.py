"""The extension's figures in Prometheus' text format, from the status of the process with the model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def prometheus(status: dict[str, Any]) -> str:
    """https://prometheus.io/docs/instrumenting/exposition_formats/ of `ExpertRows.status`."""
    lines: list[str] = []
    for name, kind, text, samples in _metrics(status):
        lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        lines += [
            f"{name}{labels} {value:g}" if isinstance(value, float) else f"{name}{labels} {value}"
            for labels, value in samples
        ]
    return "\n".join(lines) + "\n"


_Samples = list[tuple[str, int | float]]


def _metrics(status: dict[str, Any]) -> Iterator[tuple[str, str, str, _Samples]]:
    traffic: dict[str, dict[str, Any]] = status["traffic"]

    def by_phase(key: str) -> _Samples:
        return [
            (f'{{phase="{phase}"}}', found[key]) for phase, found in traffic.items() if found[key] is not None
        ]

    yield "q38_tokens_total", "counter", "Tokens whose experts were computed.", by_phase("tokens")
    yield (
        "q38_expert_hit_rate",
        "gauge",
        "Share of chosen experts in device memory, since the start.",
        by_phase("hit_rate"),
    )
    yield (
        "q38_link_bytes_total",
        "counter",
        "Bytes of expert rows read from host memory.",
        by_phase("host_bytes"),
    )
    yield (
        "q38_expert_device_bytes_total",
        "counter",
        "Bytes of expert rows read from device memory.",
        by_phase("device_bytes"),
    )
    yield "q38_expert_rows", "gauge", "Expert rows by the memory they lie in.", [
        ('{memory="device"}', status["rows_on_device"]), ('{memory="host"}', status["rows_on_host"])
    ]  # fmt: skip
    if (exchanged := status.get("rows_exchanged")) is not None:
        yield (
            "q38_expert_rows_exchanged_total",
            "counter",
            "Expert rows that changed the memory they lie in, to follow the traffic.",
            [("", exchanged)],
        )
    if (ngram := status.get("ngram")) is not None:
        yield (
            "q38_ngram_rows_total",
            "counter",
            "Rows of the n-gram table that steps needed.",
            [("", ngram["rows"])],
        )
        yield (
            "q38_ngram_hits_total",
            "counter",
            "Of these, not read from disk: repeated or cached.",
            [("", ngram["hits"])],
        )
        yield (
            "q38_ngram_ahead_total",
            "counter",
            "Of these, read before the step asked.",
            [("", ngram["ahead"])],
        )
        yield (
            "q38_ngram_wait_seconds_total",
            "counter",
            "Time that steps waited for rows.",
            [("", float(ngram["wait_s"]))],
        )
    if (kv := status.get("kv")) is not None:
        yield "q38_kv_tokens", "gauge", "Tokens that the KV cache holds.", [("", kv["used"])]
        yield "q38_kv_tokens_max", "gauge", "Tokens that it can hold.", [("", kv["total"])]
