"""Requests to one server for benchmarks/serve_gpu_kv.py, what its KV cache holds, and the report of it all."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from q38.serving.machine import probe_gpus


@dataclass
class Report:
    """Results by part, and the lines of the table: (part, what, value, as wanted)."""

    out: Path | None
    parts: dict[str, Any] = field(default_factory=dict)
    checks: list[tuple[str, str, str, bool]] = field(default_factory=list)

    def add(self, part: str, result: dict[str, Any]) -> None:
        self.parts[part] = result
        self.say(f"{part}: {json.dumps(result)}")
        if self.out:
            self.out.write_text(json.dumps({**self.parts, "checks": self.checks}, indent=1))

    def check(self, part: str, what: str, value: object, wanted: bool) -> None:
        self.checks.append((part, what, str(value), bool(wanted)))

    def say(self, line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    def table(self) -> int:
        for part, what, value, wanted in self.checks:
            self.say(f"{'ok  ' if wanted else 'FAIL'} {part:14} {what}: {value}")
        return int(not all(check[3] for check in self.checks))


class Cache:
    """Requests to one server, and what its KV cache holds."""

    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=600)

    def ask(self, ids: list[int], *, new: int = 4, scored: int = 0) -> dict[str, Any]:
        """Greedy tokens after a prompt.

        Args:
            scored: tokens at the end of the prompt whose log-probabilities are wanted; the first token has none.

        Returns:
            {"status", "error"} where it is refused, else {"status", "ids", "cached", "scores": those of the prompt and of
            the new tokens}.
        """
        body = {
            "input_ids": ids, "sampling_params": greedy(new), "return_logprob": True,
            "logprob_start_len": max(len(ids) - scored - 1, 0),
        }  # fmt: skip
        answer = self.http.post("/generate", json=body)
        if answer.status_code != 200:
            return {"status": answer.status_code, "error": answer.text}
        found = answer.json()
        meta = found["meta_info"]
        before = [entry[0] for entry in meta["input_token_logprobs"]][-scored:] if scored else []
        new_ones = [entry[0] for entry in meta["output_token_logprobs"]]
        scores = [score for score in before + new_ones if score is not None]
        return {"status": 200, "ids": found["output_ids"], "cached": meta["cached_tokens"], "scores": scores}

    def stream(self, ids: list[int], new: int) -> dict[str, Any]:
        """As `ask` without scores, and the seconds to the first and between the first and the last token."""
        begun, first, last = time.perf_counter(), 0.0, {}
        with self.http.stream(
            "POST", "/generate", json={"input_ids": ids, "sampling_params": greedy(new), "stream": True}
        ) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    first = first or time.perf_counter() - begun
                    last = json.loads(line[6:])
        if "output_ids" not in last:
            return {"status": answer.status_code, "error": json.dumps(last)}
        rest = time.perf_counter() - begun - first
        meta = last["meta_info"]
        return {
            "status": 200, "ids": last["output_ids"], "cached": meta["cached_tokens"], "first_token_s": first,
            "decode_tokens_per_s": (meta["completion_tokens"] - 1) / rest if rest > 0 else None,
        }  # fmt: skip

    def memory(self) -> dict[str, Any]:
        """Bytes behind the cache, behind expert rows on the device, kept by torch, and free at the driver (None without a GPU)."""
        status = self.http.get("/q38/residency").json()["status"]
        kept = status.get("kv_memory", {})
        gpus = probe_gpus()
        return {
            "format": kept.get("format"), "tokens": kept.get("tokens"), "bytes_per_token": kept.get("bytes_per_token"),
            "mapped": kept.get("mapped_bytes"), "ring": kept.get("ring_bytes", 0),
            "rows": status["device_bytes"], "for_steps": kept.get("kept_for_steps_bytes", 0),
            "free": gpus[0].memory_free if gpus else None, "used": status["kv"]["used"],
        }  # fmt: skip

    def flush(self) -> None:
        """Forget every prefix."""
        for _ in range(120):  # refused while an abandoned request still runs
            if self.http.post("/flush_cache").status_code == 200:
                return
            time.sleep(0.5)
        raise RuntimeError("the server does not become idle")

    def settle(self) -> dict[str, Any]:
        """Forget, and wait until the idle server has given back what it can."""
        self.flush()
        self.ask([11, 12, 13], new=1)
        before, seen = -1, self.memory()
        for _ in range(30):
            time.sleep(1)
            before, seen = seen["mapped"], self.memory()
            if before == seen["mapped"]:
                break
        return seen


def greedy(new: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": new, "ignore_eos": True}
