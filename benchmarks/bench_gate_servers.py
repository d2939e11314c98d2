"""Servers for benchmarks/bench_gate.py and its test: one that streams on schedule, and a proxy that stretches time.

Both speak HTTP/1.0 on a free port of 127.0.0.1, with a thread for each request.
"""

from __future__ import annotations

import http.client
import json
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit


@contextmanager
def steady_server(first_s: float, between_s: float) -> Iterator[str]:
    """An OpenAI-compatible server whose token k leaves `first_s + k * between_s` after the request, late by no more
    than the machine's timer. Yields its address.
    """

    class Handler(_Handler):
        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            self.answer(200 if known else 404, {"data": [{"id": "steady", "max_model_len": 100_000}]})

        def do_POST(self) -> None:
            start = time.perf_counter()
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.begin_stream()
            for k in range(body["max_tokens"]):
                _sleep_until(start + first_s + k * between_s)
                self.event({"choices": [{"index": 0, "delta": {"content": "token "}, "finish_reason": None}]})
            self.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
            usage = {"prompt_tokens": _prompt_tokens(body), "completion_tokens": body["max_tokens"]}
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    with _running(Handler) as url:
        yield url


@contextmanager
def proxy(upstream: str, *, stretch: float) -> Iterator[str]:
    """A proxy in front of `upstream` that sends what arrives t seconds after the request at `stretch * t`. Yields its
    address.
    """
    host = urlsplit(upstream).netloc

    class Handler(_Handler):
        def do_GET(self) -> None:
            status, text = _get(host, self.path, dict(self.headers))
            self.answer(status, text)

        def do_POST(self) -> None:
            start = time.perf_counter()
            body = self.rfile.read(int(self.headers["Content-Length"]))
            # Arrival times are taken by a thread of their own: the wait before a line must not delay the next one's.
            lines: queue.Queue[tuple[float, bytes]] = queue.Queue()
            connection = http.client.HTTPConnection(host)
            connection.request("POST", self.path, body, _forwarded(dict(self.headers)))
            response = connection.getresponse()

            def read() -> None:
                while line := response.readline():
                    lines.put((time.perf_counter(), line))
                lines.put((time.perf_counter(), b""))

            threading.Thread(target=read, daemon=True).start()
            self.send_response(response.status)
            self.send_header("Content-Type", response.headers.get("Content-Type", "application/json"))
            self.end_headers()
            while True:
                arrived, line = lines.get()
                _sleep_until(start + stretch * (arrived - start))
                if not line:
                    break
                self.wfile.write(line)
            connection.close()

    with _running(Handler) as url:
        yield url


class _Handler(BaseHTTPRequestHandler):
    def log_message(self, *args: object) -> None: ...

    def answer(self, status: int, document: Any) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write((document if isinstance(document, str) else json.dumps(document)).encode())

    def begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()

    def event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())


@contextmanager
def _running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def _sleep_until(moment: float) -> None:
    while (left := moment - time.perf_counter()) > 0:
        time.sleep(left)


def _prompt_tokens(body: dict[str, Any]) -> int:
    """One token for four bytes, and seven for the chat template."""
    return 7 + len(body["messages"][-1]["content"].encode()) // 4


def _get(host: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
    connection = http.client.HTTPConnection(host)
    connection.request("GET", path, headers=_forwarded(headers))
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def _forwarded(headers: dict[str, str]) -> dict[str, str]:
    """Headers without those of the one connection."""
    own = {"host", "connection", "accept-encoding", "content-length"}
    return {name: value for name, value in headers.items() if name.lower() not in own}
