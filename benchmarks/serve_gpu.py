"""A server on a GPU: speed, hit rate, bytes over the link, and what it survives. The figures of docs/performance.md.

    q38 synth full DIR --gpu-scale
    PYTHONPATH=. python benchmarks/serve_gpu.py DIR --hold 23.9GiB --ram 28GiB --out result.json        # needs a GPU
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=53 PYTHONPATH=. python benchmarks/serve_gpu.py DIR --hold 23.9GiB --ram 28GiB

--hold takes device memory in a second process until only so much is free, as on a smaller card. Prompts are random token ids, each
another one; every figure is the median of --repeats.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from q38.base.units import parse_bytes
from q38.serving.launch import Server, running_server
from q38.serving.sglang_settings import SglangSettings

RANDOM = random.Random(38)
TOKENS = 96  # decoded for one figure
VOCABULARY = (10, 1990)  # ids that the synthetic tokenizer writes


def say(name: str, value: object) -> None:
    sys.stdout.write(f"{name}: {value}\n")
    sys.stdout.flush()


@contextmanager
def held(leave: int | None) -> Iterator[None]:
    """Device memory taken by another process, so that `leave` bytes are free."""
    if leave is None:
        yield
        return
    code = (
        "import sys, torch; torch.zeros(1, device='cuda'); free, _ = torch.cuda.mem_get_info(); "
        f"x = torch.empty(max(free - {leave}, 0), dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); "
        "print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None and holder.stdout.readline().strip() == "held"
    try:
        yield
    finally:
        holder.communicate()


class Measured:
    """Requests to one server, and the counters around them."""

    def __init__(self, server: Server) -> None:
        self.http = httpx.Client(base_url=server.url, timeout=600)

    def counters(self) -> dict[str, Any]:
        status: dict[str, Any] = self.http.get("/q38/residency").json()["status"]
        return status

    def stream(self, ids: list[int], tokens: int) -> tuple[float, list[float]]:
        """(seconds to the first token, seconds between the following ones)."""
        body = {"input_ids": ids, "sampling_params": _greedy(tokens), "stream": True}
        begun = last = time.perf_counter()
        first, gaps, done = 0.0, [], 0
        with self.http.stream("POST", "/generate", json=body) as answer:
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                count, now = json.loads(line[6:])["meta_info"]["completion_tokens"], time.perf_counter()
                if count > done:
                    if done:
                        gaps.append((now - last) / (count - done))
                    else:
                        first = now - begun
                    last, done = now, count
        return first, gaps

    def run(self, context: int, tokens: int, repeats: int) -> dict[str, Any]:
        """Medians for one prompt length: time to the first token, time per token, traffic of both phases."""
        first, each, before = [], [], self.counters()
        for _ in range(repeats):
            seconds, gaps = self.stream(prompt(context), tokens)
            first.append(seconds)
            each += gaps
        after = self.counters()
        wait = after["ngram"]["wait_s"] - before["ngram"]["wait_s"] if "ngram" in after else None
        return {
            "context": context,
            "first_token_s": statistics.median(first),
            "prefill_tokens_per_s": context / statistics.median(first),
            "decode_tokens_per_s": 1 / statistics.median(each),
            "ngram_wait_s": wait,
            **{
                phase: _traffic(before["traffic"][phase], after["traffic"][phase])
                for phase in before["traffic"]
            },
        }

    def survives(self) -> dict[str, Any]:
        """Requests that are abandoned, malformed, or too many at once."""
        for i in range(100):
            body = {"input_ids": prompt(40 + i), "sampling_params": _greedy(2000), "stream": True}
            with self.http.stream("POST", "/generate", json=body) as answer:
                next(answer.iter_lines())
        message = [{"role": "user", "content": "x"}]
        bad: list[dict[str, Any]] = [
            {"messages": "x"}, {"messages": []}, {"messages": message, "max_tokens": -1}, {"prompt": [10**9]}
        ]  # fmt: skip
        paths = ("/v1/chat/completions",) * 3 + ("/v1/completions",)
        codes = [
            self.http.post(path, json={"model": "m", **body}).status_code
            for path, body in zip(paths, bad, strict=True)
        ]
        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(lambda i: self.stream(prompt(30 + i), 8), range(32)))
        return {"abandoned": 100, "malformed": codes, "burst_answered": len(answers)}


def prompt(length: int) -> list[int]:
    return [RANDOM.randrange(*VOCABULARY) for _ in range(length)]


def _greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def _traffic(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    tokens, host = (after[key] - before[key] for key in ("tokens", "host_bytes"))
    return {"tokens": tokens, "host_bytes": host, "host_bytes_per_token": host / tokens if tokens else None}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--hold", help="leave only so much device memory free")
    parser.add_argument("--ram", help="host memory that the server may use")
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--contexts", default="128,2000,10000")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    profile = arguments.model / "routing-profile.safetensors"
    settings = SglangSettings(
        ram=parse_bytes(arguments.ram) if arguments.ram else None,
        chunk=arguments.chunk,
        profile=profile if profile.is_file() else None,
    )
    leave = parse_bytes(arguments.hold) if arguments.hold else None
    with held(leave), running_server(arguments.model, name="m", engine="sglang", sglang=settings) as server:
        measured = Measured(server)
        result: dict[str, Any] = {"load_s": server.load_s}
        measured.stream(prompt(3000), 8)  # compiles what the first prompt needs
        for context in map(int, arguments.contexts.split(",")):
            result[f"context {context}"] = measured.run(context, TOKENS, arguments.repeats)
        result["survives"] = measured.survives()
        result["status"] = measured.counters()
        for name, value in result.items():
            say(name, value)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
