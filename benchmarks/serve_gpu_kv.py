"""The KV cache of a server on a GPU: a long prompt and the next turn, conversations, limits, leaks, every format.

    q38 synth full DIR --gpu-scale
    q38 synth full TINY
    PYTHONPATH=. python benchmarks/serve_gpu_kv.py DIR --hold 23.9GiB --ram 28GiB --tiny TINY --out kv.json   # needs a GPU
    PYTHONPATH=. python benchmarks/serve_gpu_kv.py TINY --tiny TINY --device cpu --context 2048 --chunk 128 --long 1800 --turn 100

One server of DIR answers the parts limit, short, long, conversations and requests, in that order; servers of TINY, one a format
and all at once, answer the part formats. Prompts are random token ids. Every part is written to --out as soon as it
is done; the table at the end says which line of it is as wanted, and the exit code is 1 where one is not.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serve_gpu import held, prompt
from benchmarks.serve_gpu import limit as time_limit
from benchmarks.serve_kv_client import Cache, Report, greedy
from benchmarks.serve_kv_turns import apart, conversations
from q38.base.errors import Q38Error
from q38.base.units import GIB, MIB, parse_bytes
from q38.serving.launch import Server, running_server
from q38.serving.machine import probe_gpus
from q38.serving.sglang_settings import SglangSettings

PARTS = ("limit", "short", "long", "conversations", "requests", "formats")
ZEROS = "zeros"  # a cache of zeros: what a format's error is measured against
SHORT = (1, 64, 65)  # a page holds 64 tokens
REQUESTS = 200
FIRST_TOKEN_S, LEAK = 1.0, 64 * MIB
PAGE = 64
TEXT, STEP, DECODED = 640, 128, 32  # of the part formats: prompt, one prefill step, tokens after it


@dataclass(frozen=True)
class Sizes:
    """Tokens: of the context, of the long prompt, of a conversation's first turn."""

    context: int
    long: int
    turn: int


def limit(cache: Cache, sizes: Sizes, report: Report) -> dict[str, Any]:
    """A prompt one token over the limit, and the answer after it."""
    over = cache.ask(prompt(sizes.context + 1), new=1)
    after = cache.ask(prompt(10), new=1)
    told = over.get("error", "")
    report.check(
        "limit", f"status of {sizes.context + 1} tokens", over["status"], 400 <= over["status"] < 500
    )
    report.check("limit", "the message names the limit", told[:160], str(sizes.context) in told)
    report.check("limit", "the next request", after["status"], after["status"] == 200)
    return {"status": over["status"], "message": told}


def short(cache: Cache, sizes: Sizes, report: Report) -> dict[str, Any]:
    """Prompts of a token and around a page."""
    del sizes
    result = {}
    for tokens in SHORT:
        found = cache.ask(prompt(tokens), scored=tokens, new=8)
        scores = found.get("scores", [])
        report.check("short", f"{tokens} tokens", found["status"], _finite(scores, tokens - 1 + 8))
        result[str(tokens)] = found
    return result


def long(cache: Cache, sizes: Sizes, report: Report) -> dict[str, Any]:
    """A prompt that nearly fills the context, the next turn over its prefix, and the bytes behind both."""
    idle = cache.settle()
    ids = prompt(sizes.long)
    with lowest_free() as lowest:
        first = cache.stream(ids, 32)
    result: dict[str, Any] = {"tokens": sizes.long, "idle": idle, "first": first, "lowest_free": lowest}
    report.check("long", f"{sizes.long} tokens", first.get("error", first["status"]), first["status"] == 200)
    if first["status"] != 200:
        return result
    first["prefill_tokens_per_s"] = sizes.long / first["first_token_s"]
    full = cache.memory()
    turn = ids + first.pop("ids") + prompt(min(200, sizes.context // 16))
    second = cache.stream(turn, 32)
    second.pop("ids", None)
    result |= {"full": full, "second": second}
    report.check("long", "prefill, tokens/s", f"{first['prefill_tokens_per_s']:.0f}", True)
    report.check(
        "long", "tokens of the next turn that were cached", second.get("cached"),
        second.get("cached", 0) >= sizes.long - 4096,
    )  # fmt: skip
    seconds = second.get("first_token_s", 99.0)
    report.check("long", "next turn, s to the first token", f"{seconds:.3f}", seconds <= FIRST_TOKEN_S)
    if full["mapped"] is not None:
        _bytes(result, idle, full, report)
    return result


def _bytes(result: dict[str, Any], idle: dict[str, Any], full: dict[str, Any], report: Report) -> None:
    """Bytes a token as planned, as mapped, and as the driver sees them."""
    planned = full["bytes_per_token"] - full["ring"] / full["tokens"]
    mapped = full["mapped"] - idle["mapped"]
    per_token = mapped / result["tokens"]
    result["bytes"] = {"planned_without_ring": planned, "mapped": per_token}
    # Whole chunks: every buffer may hold one that is used in part.
    slack = 4 * 2 * 12 * 2 * MIB / result["tokens"]
    wanted = abs(per_token - planned) <= max(0.01 * planned, slack)
    report.check("long", "bytes a token, mapped (planned)", f"{per_token:.0f} ({planned:.0f})", wanted)
    if idle["free"] is not None:
        # Expert rows make room; the remainder is what torch keeps for its steps.
        other = idle["free"] - full["free"] - mapped - (full["rows"] - idle["rows"])
        result["bytes"]["driver_beyond_cache_and_rows"] = other
        report.check("long", "taken beside cache and rows, MiB", other // MIB, True)
        lowest = min(result["lowest_free"], default=0)
        report.check("long", "lowest free memory, MiB", lowest // MIB, lowest > 0)


@contextmanager
def lowest_free() -> Iterator[list[int]]:
    """The driver's free bytes, twice a second; empty without a GPU."""
    seen: list[int] = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(0.5) and (gpus := probe_gpus()):
            seen[:] = [min([*seen, gpus[0].memory_free])]

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def requests(cache: Cache, sizes: Sizes, report: Report) -> dict[str, Any]:
    """Many requests, some of several pages, some abandoned; what the driver has free when the server is idle again."""
    before = cache.settle()
    begun = time.perf_counter()
    for i in range(REQUESTS):
        if i % 10 == 9:  # abandoned after the first token
            body = {"input_ids": prompt(3 * PAGE + i), "sampling_params": greedy(200), "stream": True}
            with cache.http.stream("POST", "/generate", json=body) as answer:
                next(answer.iter_lines())
        else:
            cache.ask(prompt(min(sizes.turn, 1 + i % 16 + (i % 50 == 0) * 10 * PAGE)), new=2)
    seconds = time.perf_counter() - begun
    after = cache.settle()
    report.check("requests", "bytes still mapped", after["mapped"], after["mapped"] == before["mapped"])
    if before["free"] is not None:
        lost = before["free"] - after["free"]
        report.check("requests", f"free memory lost over {REQUESTS} requests, MiB", lost // MIB, lost <= LEAK)
        lost += before["for_steps"] - after["for_steps"]
        report.check("requests", "the same, with what torch keeps for steps", lost // MIB, lost <= LEAK)
    return {"requests": REQUESTS, "seconds": seconds, "before": before, "after": after}


def formats(arguments: argparse.Namespace, report: Report) -> dict[str, Any]:
    """Short prompts and one of several prefill steps, in every format; on a GPU all servers run at the same time."""
    text, prompts = prompt(TEXT), [prompt(tokens) for tokens in SHORT]
    names = ["bf16", ZEROS, *(name for name in arguments.formats.split(",") if name != "bf16")]

    def run(name: str) -> dict[str, Any]:
        try:
            with one_format(arguments, name) as server:
                cache = Cache(server.url)
                return {
                    "load_s": server.load_s, "memory": cache.memory(),
                    "short": [cache.ask(ids, scored=len(ids), new=8) for ids in prompts],
                    "text": [cache.ask(text, scored=TEXT - STEP, new=DECODED) for _ in range(2)],
                }  # fmt: skip
        except (Q38Error, httpx.HTTPError) as error:
            return {"error": f"{type(error).__name__}: {error}"[:800]}

    with ThreadPoolExecutor(1 if arguments.device == "cpu" else len(names)) as pool:
        found = dict(zip(names, pool.map(run, names), strict=True))
    reference = found["bf16"]["text"][0]
    for result in found.values():
        if "error" not in result:
            first, second = result["text"]
            result |= {
                "prefill": apart(first, reference, TEXT - STEP),
                "noise": apart(first, second, TEXT - STEP),
            }
            same = next(
                (
                    i
                    for i, pair in enumerate(zip(first["ids"], reference["ids"], strict=True))
                    if len({*pair}) > 1
                ),
                DECODED,
            )
            result |= {
                "same_tokens": same,
                "decode": apart(first, reference, same, start=TEXT - STEP) if same else None,
            }
    for name in names:
        if name != ZEROS:
            judge(name, found[name], found[ZEROS], report)
    return found


def judge(name: str, result: dict[str, Any], zeros: dict[str, Any], report: Report) -> None:
    """The lines of one format in the table."""
    if "error" in result:
        report.check("formats", name, result["error"], False)
        return
    fine = all(
        _finite(answer.get("scores", []), n - 1 + 8) for answer, n in zip(result["short"], SHORT, strict=True)
    )
    report.check("formats", f"{name}: prompts of {SHORT} tokens", "finite" if fine else "not", fine)
    control = zeros.get("prefill", 0.0)
    told = f"{result['prefill']:.5f} (noise {result['noise']:.5f}, zeros {control:.5f})"
    report.check("formats", f"{name}: mean |d| nats from bf16", told, result["prefill"] < 0.5 * control)
    told = (
        "none" if result["decode"] is None else f"{result['decode']:.5f} over {result['same_tokens']} tokens"
    )
    report.check("formats", f"{name}: the same of decoded tokens", told, result["same_tokens"] > 0)


@contextmanager
def one_format(arguments: argparse.Namespace, name: str) -> Iterator[Server]:
    """A small server whose prompts are read in steps of STEP tokens."""
    on_cpu = arguments.device == "cpu"
    settings = SglangSettings(
        device=arguments.device, context=1024, chunk=STEP, kv="int4" if name == ZEROS else name, kv_ring=2 * STEP,
        kv_zeroed=True if name == ZEROS else None, gpu_memory=None if on_cpu else 12 * GIB,
    )  # fmt: skip
    model = arguments.tiny or arguments.model
    with running_server(
        model, ple=arguments.ple, name=name, engine="sglang", sglang=settings, log=log(arguments, name)
    ) as server:
        yield server


def _finite(scores: list[float], count: int) -> bool:
    return len(scores) == count and bool(np.isfinite(scores).all())


ON_ONE_SERVER: dict[str, Callable[[Cache, Sizes, Report], dict[str, Any]]] = {
    "limit": limit, "short": short, "long": long, "requests": requests,
    "conversations": lambda cache, sizes, report: conversations(cache, sizes.turn, report),
}  # fmt: skip


def main() -> int:
    arguments = parse()
    report, end = Report(arguments.out), time.perf_counter() + arguments.deadline
    parts = arguments.parts.split(",")
    sizes = Sizes(arguments.context, arguments.long, arguments.turn)
    on_one_server = [part for part in ON_ONE_SERVER if part in parts]
    with ExitStack() as stack:
        if on_one_server:
            url = arguments.url or stack.enter_context(one_server(arguments, report))
            cache = Cache(url)
            cache.ask(prompt(min(3000, sizes.turn)), new=8)  # compiles what the first prompt needs
        for part in on_one_server:
            measure(part, partial(ON_ONE_SERVER[part], cache, sizes, report), report, end)
    if "formats" in parts:
        measure("formats", partial(formats, arguments, report), report, end)
    return report.table()


def measure(part: str, run: Callable[[], dict[str, Any]], report: Report, end: float) -> None:
    """One part, within what is left of the time; one that fails leaves the next its turn."""
    begun = time.perf_counter()
    try:
        with time_limit(end - begun):
            result = run()
    except Exception as error:  # noqa: BLE001  whatever it is
        result = {"error": f"{type(error).__name__}: {error}"[:800]}
        report.check(part, "ended with", result["error"], False)
    report.add(part, {**result, "took_s": round(time.perf_counter() - begun, 1)})


@contextmanager
def one_server(arguments: argparse.Namespace, report: Report) -> Iterator[str]:
    """URL of a server of the model, in the device memory that --hold leaves."""
    profile = arguments.model / "routing-profile.safetensors"
    settings = SglangSettings(
        device=arguments.device, context=arguments.context, chunk=arguments.chunk, kv=arguments.kv, prefix_cache=True,
        ram=parse_bytes(arguments.ram) if arguments.ram else None, profile=profile if profile.is_file() else None,
    )  # fmt: skip
    with (
        held(parse_bytes(arguments.hold) if arguments.hold else None),
        running_server(
            arguments.model, ple=arguments.ple, name="m", engine="sglang", sglang=settings, log=log(arguments, "one")
        ) as server,
    ):  # fmt: skip
        report.add("server", {"load_s": server.load_s, **Cache(server.url).memory()})
        yield server.url


def log(arguments: argparse.Namespace, name: str) -> Path | None:
    return arguments.logs / f"kv-{name}.log" if arguments.logs else None


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tiny", type=Path, help="small model for the part formats; default: the model")
    parser.add_argument("--ple", type=Path, help="n-gram table where it is not in the model's directory")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--kv", default="auto", help="format of the one server")
    parser.add_argument("--formats", default="int8ring_int4,int8,int4,fp8")
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--hold", help="leave only so much device memory free")
    parser.add_argument("--ram", help="host memory that the server may use")
    parser.add_argument("--context", type=int, default=262_144)
    parser.add_argument("--chunk", type=int)
    parser.add_argument("--long", type=int, default=250_000, help="tokens of the long prompt")
    parser.add_argument("--turn", type=int, default=1_900, help="tokens of a conversation's first turn")
    parser.add_argument("--url", help="a server that runs already, with --prefix-cache")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    parser.add_argument("--deadline", type=float, default=3600, help="seconds after which no part goes on")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
