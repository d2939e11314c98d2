"""One `q38 serve` under measurement: device memory held back, requests timed, results kept as they come."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

RANDOM = random.Random(38)
VOCABULARY = (10, 1990)  # ids that the synthetic tokenizer writes
Body = dict[str, Any]

parts: dict[str, Callable[[Run], None]] = {}


def part(function: Callable[[Run], None]) -> Callable[[Run], None]:
    """Register a part of the measurement under its name."""
    parts[function.__name__] = function
    return function


def say(name: str, value: object) -> None:
    sys.stdout.write(f"{name}: {value}\n")
    sys.stdout.flush()


def prompt(length: int) -> list[int]:
    """Random token ids, different ones each time."""
    return [RANDOM.randrange(*VOCABULARY) for _ in range(length)]


def greedy(tokens: int) -> Body:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


@contextmanager
def held(leave: int | None) -> Iterator[None]:
    """Device memory taken by another process, so that `leave` bytes are free; None takes none."""
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
    assert holder.stdout is not None
    if holder.stdout.readline().strip() != "held":
        raise RuntimeError("device memory could not be held")
    try:
        yield
    finally:
        holder.communicate()


class Measured:
    """Requests to one server, and its counters around them. stall_s: a read that brings nothing for so long fails."""

    def __init__(self, url: str, *, stall_s: float = 120.0) -> None:
        self.http = httpx.Client(base_url=url, timeout=stall_s, trust_env=False)

    def counters(self) -> Body:
        """The status of the process with the model."""
        status: Body = self.http.get("/q38/residency").raise_for_status().json()["status"]
        return status

    def stream(self, ids: list[int], tokens: int) -> list[tuple[int, float]]:
        """(tokens so far, seconds since the request) of each piece of a streamed answer."""
        body = {"input_ids": ids, "sampling_params": greedy(tokens), "stream": True}
        begun = time.perf_counter()
        pieces: list[tuple[int, float]] = []
        with self.http.stream("POST", "/generate", json=body) as answer:
            if answer.status_code != httpx.codes.OK:
                raise RuntimeError(f"HTTP {answer.status_code}: {answer.read().decode()[:200]}")
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    document = json.loads(line[6:])
                    if "error" in document:
                        raise RuntimeError(str(document["error"])[:200])
                    pieces.append((document["meta_info"]["completion_tokens"], time.perf_counter() - begun))
        if not pieces or pieces[-1][0] != tokens:
            raise RuntimeError(f"{pieces[-1][0] if pieces else 0} of {tokens} tokens")
        return pieces

    def answer_s(self, context: int = 40, tokens: int = 8) -> float:
        """Seconds of one whole short answer."""
        return self.stream(prompt(context), tokens)[-1][1]

    def speed(self, context: int, tokens: int, repeats: int, *, warm: bool = False) -> Body:
        """Medians for one prompt length: time to the first token, time per token, traffic of both phases.

        warm: one more run before them, which compiles what this length needs.
        """
        result: Body = {"context": context, "runs": repeats}
        if warm:
            result["first_token_s, first run"] = round(self.stream(prompt(context), tokens)[0][1], 4)
        before = self.counters()
        runs = [self.stream(prompt(context), tokens) for _ in range(repeats)]
        after = self.counters()
        firsts = [pieces[0][1] for pieces in runs]
        # The first piece can hold several tokens.
        ends = [(pieces[0], pieces[-1]) for pieces in runs]
        paces = [(last[0] - first[0]) / (last[1] - first[1]) for first, last in ends if last[0] > first[0]]
        result |= {
            "first_token_s": _spread(firsts),
            "prefill_tokens_per_s": round(context / statistics.median(firsts), 1),
            "decode_tokens_per_s": _spread(paces) if paces else None,
            **{
                phase: traffic(before["traffic"][phase], after["traffic"][phase])
                for phase in before["traffic"]
            },
        }
        if "ngram" in after:
            rows, hits, wait = (
                after["ngram"][key] - before["ngram"][key] for key in ("rows", "hits", "wait_s")
            )
            result["ngram"] = {"rows": rows, "hits": hits, "wait_s": round(wait, 4)}
        return result


def _spread(values: Sequence[float]) -> Body:
    return {"median": round(statistics.median(values), 4), "all": [round(v, 4) for v in values]}


def traffic(before: Body, after: Body) -> Body:
    """What one phase read between two states of its counters."""
    tokens = after["tokens"] - before["tokens"]
    moved = {key: after[key] - before[key] for key in before if key.endswith("_bytes")}
    hits = [
        state["hit_rate"] * state["tokens"] if state["hit_rate"] is not None else 0.0
        for state in (before, after)
    ]
    return {
        "tokens": tokens,
        "hit_rate": round((hits[1] - hits[0]) / tokens, 4) if tokens else None,
        **moved,
        "host_bytes_per_token": round(moved["host_bytes"] / tokens) if tokens else None,
    }


class Run:
    """The server under measurement, started when a part first needs it and again after a part that ended it.

    options: of `q38 serve`. results: what was measured, in `out` after every part.
    """

    def __init__(
        self, model: Path, options: Sequence[str], logs: Path, out: Path | None, settings: Any
    ) -> None:
        self.model, self.options, self.logs, self.out, self.settings = (
            model,
            list(options),
            logs,
            out,
            settings,
        )
        self.results: Body = {"model": str(model), "options": self.options}
        self.process: subprocess.Popen[str] | None = None
        self.ready: Body = {}
        self._measured: Measured | None = None
        self._told = 0  # where its last start begins in serve.txt
        logs.mkdir(parents=True, exist_ok=True)

    @property
    def on_cpu(self) -> bool:
        return "cpu" in self.options

    def record(self, name: str, value: object) -> None:
        """Print a result and write all of them."""
        self.results[name] = value
        say(name, value)
        if self.out is not None:
            partial = self.out.with_suffix(".partial")
            partial.write_text(json.dumps(self.results, indent=1))
            partial.replace(self.out)

    @property
    def report(self) -> str:
        """What q38 serve told people, from its last start on."""
        file = self.logs / "serve.txt"
        return file.read_text(errors="replace")[self._told :] if file.is_file() else ""

    @property
    def refusal(self) -> str:
        """The line in which it said why it ended."""
        return next(
            (line[:800] for line in reversed(self.report.splitlines()) if line.startswith("q38:")), ""
        )

    def measured(self) -> Measured:
        """The server's client; starts the server where none answers, and records one that ended by itself."""
        if self._measured is None or self.process is None or not self._answers():
            if self.process is not None:
                code = self.stop()
                self.record("the server ended by itself", {"exit code": code, "report": self.refusal})
            self.start()
        assert self._measured is not None
        return self._measured

    def _answers(self) -> bool:
        assert self.process is not None and self._measured is not None
        for _ in range(5):
            try:
                if self._measured.http.get("/health", timeout=10).status_code == httpx.codes.OK:
                    return True
            except httpx.HTTPError:
                time.sleep(1)
            if self.process.poll() is not None:
                break
        return False

    def start(self) -> float:
        """Start `q38 serve`. Returns the seconds until it was ready."""
        self.stop()
        command = [sys.executable, "-m", "q38", "serve", str(self.model), "--engine", "sglang", "--name", "m"]
        command += ["--port", "0", "--log", str(self.logs / "server.log"), "--json", *self.options]
        begun = time.perf_counter()
        with (self.logs / "serve.txt").open("a") as told:
            self._told = told.tell()
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=told, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        ready: Body = json.loads(line or "{}")
        if "url" not in ready:
            raise RuntimeError(f"q38 serve, exit code {self.process.wait(60)}: {self.refusal}")
        self.ready = ready
        self._measured = Measured(self.ready["url"], stall_s=self.settings.stall)
        return time.perf_counter() - begun

    def stop(self) -> int | None:
        """End `q38 serve`. Returns its exit code, None where none ran."""
        if self.process is None:
            return None
        self.process.terminate()  # nothing where it has ended
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self.process = None

    def tree(self) -> list[psutil.Process]:
        """The server's processes: SGLang's own and those it spawned."""
        server = psutil.Process(self.ready["pid"])
        return [server, *server.children(recursive=True)]


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """TimeoutError in the main thread after so many seconds."""

    def late(_number: int, _frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def forget_pages(files: Sequence[Path]) -> None:
    """Have the kernel drop files from its page cache."""
    for file in files:
        fd = os.open(file, os.O_RDONLY)
        try:
            os.fsync(fd)  # pages still to be written would stay
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
