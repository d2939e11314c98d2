"""The parts of benchmarks/serve_gpu.py: speed, and what a server survives. Each is a function of a Run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.residency_parts import sequential_read
from benchmarks.serve_profile import profile_steps, table
from benchmarks.serve_session import Body, Run, forget_pages, greedy, part, prompt, traffic

_SAMPLE = 1  # files read to find the disk's speed
_BURST = 32
_ASKED = 64  # tokens of a prompt whose answer is what matters


@part
def products(run: Run) -> None:
    """The matrix library at the model's shapes: where it is wrong, nothing that follows would mean anything."""
    device = ["--device", "cpu"] if run.on_cpu else []
    command = [sys.executable, "-m", "benchmarks.products", str(run.model), *device]
    found = subprocess.run(command, capture_output=True, text=True)
    run.record("products", found.stdout.splitlines()[-5:])
    if found.returncode:
        told = found.stdout.splitlines()[-1:] + found.stderr.splitlines()[-1:]
        raise SystemExit(f"matrix products: {told[0] if told else 'not checked'}")


def shards(run: Run) -> list[Path]:
    return sorted(run.model.glob("model-*.safetensors"))


@part
def load(run: Run) -> None:
    """Seconds from the command to a generated token, cold, beside what the disk allows."""
    run.stop()
    files = shards(run)
    size = sum(file.stat().st_size for file in files)
    rates = {threads: sequential_read(files[:_SAMPLE], threads) for threads in (1, 8)}  # GB/s
    forget_pages(files)
    seconds = run.start()
    run.record(
        "load",
        {
            "seconds": round(seconds, 1),
            "until a token, by q38 serve": run.ready["load_s"],
            "bytes": size,
            "disk GB/s by threads": {threads: round(rate, 2) for threads, rate in rates.items()},
            "floor, seconds": round(size / max(rates.values()) / 1e9, 1),
            "plan": [
                line for line in run.report.splitlines() if line.startswith(("GPU:", "host:", "expert"))
            ],
        },
    )
    status(run)


@part
def speed(run: Run) -> None:
    """Decode and prefill at each of --contexts. Prompts differ, so a prefix cache has nothing to give."""
    measured, cached = run.measured(), "--prefix-cache" in run.options
    run.record("speed", f"random prompts, no two alike; prefix cache {'on' if cached else 'off'}")
    measured.stream(prompt(min(3000, max(run.settings.contexts))), 8)  # compiles what the first prompt needs
    for context in run.settings.contexts:
        warm = context <= run.settings.warm
        run.record(
            f"context {context}",
            measured.speed(context, run.settings.tokens, run.settings.repeats, warm=warm),
        )


@part
def following(run: Run) -> None:
    """Speed and hit rate of answer after answer, while rows follow the traffic (`--adapt`): how fast, and to what."""
    measured, windows = run.measured(), []
    before = measured.counters()
    for _ in range(run.settings.windows):
        pieces = measured.stream(prompt(_ASKED), run.settings.window)
        after = measured.counters()
        (first, begun), (last, ended) = pieces[0], pieces[-1]
        read = traffic(before["traffic"]["decode"], after["traffic"]["decode"])
        exchanged = (after["rows_exchanged"] or 0) - (before["rows_exchanged"] or 0)
        windows.append(
            {"tokens_per_s": round((last - first) / (ended - begun), 1), "hit_rate": read["hit_rate"], "rows_exchanged": exchanged}
        )  # fmt: skip
        before = after
    run.record("following", windows)


@part
def profile(run: Run) -> None:
    """Kernels of one prompt chunk and of a few decode steps, by torch's profiler inside the server."""
    for context in run.settings.profile_contexts:
        for step, found in profile_steps(
            run.measured(), run.logs / "traces", context, cpu=run.on_cpu
        ).items():
            text = table(found)
            (run.logs / f"profile-{step}-{context}.txt").write_text(text)
            run.record(f"profile of {step} at {context}", "\n" + text)


@part
def abandoned(run: Run) -> None:
    """Requests whose client leaves after the first piece; the next answer must come as fast as before."""
    measured = run.measured()
    before, used = measured.answer_s(), measured.counters().get("kv")
    for i in range(run.settings.cancels):
        body = {"input_ids": prompt(40 + i), "sampling_params": greedy(500), "stream": True}
        with measured.http.stream("POST", "/generate", json=body) as answer:
            next(answer.iter_lines())
    after = measured.answer_s()
    found = {"requests": run.settings.cancels, "answer before, s": before, "answer after, s": after}
    run.record("abandoned", found | {"kv before": used, "kv after": measured.counters().get("kv")})


@part
def burst(run: Run) -> None:
    """Many requests at once: those beyond the limit wait, and none is lost."""
    measured, begun = run.measured(), time.perf_counter()

    def ask(i: int) -> float | str:
        try:
            return measured.stream(prompt(30 + i), 8)[-1][1]
        except (httpx.HTTPError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"

    with ThreadPoolExecutor(_BURST) as pool:
        answers = list(pool.map(ask, range(_BURST)))
    seconds = [answer for answer in answers if isinstance(answer, float)]
    lost = [answer for answer in answers if isinstance(answer, str)]
    found: Body = {"requests": _BURST, "answered": len(seconds), "lost": lost}
    if seconds:
        found |= {"first after, s": round(min(seconds), 2), "last after, s": round(max(seconds), 2)}
    run.record("burst", found | {"seconds": round(time.perf_counter() - begun, 2)})


_MESSAGE = [{"role": "user", "content": "x"}]
_CHAT, _TEXT, _NATIVE = "/v1/chat/completions", "/v1/completions", "/generate"
MALFORMED: dict[str, tuple[str, Any]] = {
    "not JSON": (_CHAT, b'{"model": "m", '),
    "no messages": (_CHAT, {}),
    "messages a string": (_CHAT, {"messages": "x"}),
    "no message in messages": (_CHAT, {"messages": []}),
    "unknown role": (_CHAT, {"messages": [{"role": "nobody", "content": "x"}]}),
    "max_tokens -1": (_CHAT, {"messages": _MESSAGE, "max_tokens": -1}),
    "temperature a word": (_CHAT, {"messages": _MESSAGE, "temperature": "hot"}),
    "temperature -1": (_CHAT, {"messages": _MESSAGE, "temperature": -1}),
    "top_p 2": (_CHAT, {"messages": _MESSAGE, "top_p": 2}),
    "token id 10^9": (_TEXT, {"prompt": [10**9]}),
    "token id -1": (_TEXT, {"prompt": [-1]}),
    "prompt an object": (_TEXT, {"prompt": {"text": "x"}}),
    "native, token id 10^9": (_NATIVE, {"input_ids": [5, 10**9]}),
    "native, no prompt": (_NATIVE, {}),
    "native, max_new_tokens -1": (_NATIVE, {"text": "x", "sampling_params": {"max_new_tokens": -1}}),
    "residency, unknown action": ("/q38/residency", {"action": "dance"}),
    "residency, not JSON": ("/q38/residency", b"["),
}


def codes(run: Run, requests: dict[str, tuple[str, Any]]) -> tuple[dict[str, str], list[str]]:
    """(what each request was answered, those whose answer was not 4xx)."""
    answers, wrong, measured = {}, [], run.measured()
    for name, (path, body) in requests.items():
        content = body if isinstance(body, bytes) else json.dumps({"model": "m", **body}).encode()
        try:
            answer = measured.http.post(path, content=content, headers={"Content-Type": "application/json"})
            answers[name] = f"{answer.status_code} {answer.text[:160]}"
            refused = 400 <= answer.status_code < 500
        except httpx.HTTPError as error:
            answers[name], refused = f"{type(error).__name__}: {error}", False
            measured = run.measured()
        if not refused:
            wrong.append(name)
    return answers, wrong


@part
def malformed(run: Run) -> None:
    """Requests that are none: each must be refused with a 4xx, and the next answer must come."""
    answers, wrong = codes(run, MALFORMED)
    run.record("malformed", answers)
    run.record("malformed, not 4xx", wrong)
    run.record("malformed, answer after, s", run.measured().answer_s())


@part
def too_long(run: Run) -> None:
    """A prompt one token beyond what the context allows, and one whose answer would be."""
    context = run.measured().http.get("/v1/models").json()["data"][0]["max_model_len"]
    one = {"max_tokens": 1}
    answers, wrong = codes(
        run,
        {
            "native, context + 1": (
                _NATIVE,
                {"input_ids": prompt(context + 1), "sampling_params": greedy(1)},
            ),
            "context + 1": (_TEXT, {"prompt": prompt(context + 1), **one}),
            "prompt and answer one beyond": (_TEXT, {"prompt": prompt(64), "max_tokens": context - 63}),
        },
    )
    run.record("one token too long", {"context": context, "answers": answers, "not 4xx": wrong})
    run.record("one token too long, answer after, s", run.measured().answer_s())


@part
def killed(run: Run) -> None:
    """kill -9 of the server under `q38 serve`: what it reports, what stays behind, how the next start goes."""
    run.measured()
    _kill(run, "kill of the server", run.tree()[0])
    forget_pages(shards(run))
    run.record("second load (cold files, kernels compiled), seconds", round(run.start(), 1))
    run.record("second load, answer after, s", run.measured().answer_s())


@part
def scheduler_killed(run: Run) -> None:
    """The same for the process that holds the model."""
    run.measured()
    spawned = run.tree()[1:]
    largest = max(spawned, key=lambda process: process.memory_info().rss)
    _kill(run, "kill of the scheduler", largest)


def _kill(run: Run, name: str, victim: psutil.Process) -> None:
    family, begun = run.tree(), time.perf_counter()
    assert run.process is not None
    memory = device_memory()
    os.kill(victim.pid, signal.SIGKILL)
    code = run.process.wait(120)
    seconds = time.perf_counter() - begun
    _, alive = psutil.wait_procs(family, timeout=10)
    found = {"exit code": code, "after, s": round(seconds, 2), "report": run.refusal}
    left = [process.pid for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    run.record(name, found | {"processes left": left, "device memory": [memory, device_memory()]})


@part
def status(run: Run) -> None:
    """Where the rows lie, what was read so far, and the memory of the server's processes."""
    counters = run.measured().counters()
    counters.pop("resident_per_layer", None)
    memory = {p.pid: {"rss": p.memory_info().rss, "name": p.name()} for p in run.tree()}
    run.record("status", counters | {"processes": memory, "device memory": device_memory()})


def device_memory() -> str | None:
    """Used and free, as nvidia-smi tells; None without it."""
    command = ["nvidia-smi", "--query-gpu=memory.used,memory.free", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return None
