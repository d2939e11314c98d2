"""A proxy in front of a real server, to provoke the faults that the server itself does not have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx


@dataclass(frozen=True)
class Reply:
    """An answer instead of the server's."""

    body: str | bytes
    status: int = 200


@dataclass(frozen=True)
class Stall:
    """Silence for so many seconds, then the connection closes."""

    seconds: float


@dataclass(frozen=True)
class Change:
    """The server's answer with every line changed."""

    line: Callable[[str], str]


Fault = Reply | Stall | Change | None


class Proxy:
    """`fault` decides for each POST, from path and body, which it may change."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.fault: Callable[[str, dict[str, Any]], Fault] = lambda path, body: None
        self.die: Callable[[], None] = lambda: None


@contextmanager
def faulty_proxy(upstream: str) -> Iterator[Proxy]:
    """Run one on a free port. `die` makes it refuse connections from then on, open ones included."""
    dead = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            self._answer("GET", {})

        def do_POST(self) -> None:
            self._answer("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def _answer(self, method: str, body: dict[str, Any]) -> None:
            fault = proxy.fault(self.path, body) if body else None
            if dead.is_set():
                self.close_connection = True
                return
            if isinstance(fault, Stall):
                time.sleep(fault.seconds)
            elif isinstance(fault, Reply):
                self._head(fault.status)
                self.wfile.write(fault.body.encode() if isinstance(fault.body, str) else fault.body)
            else:
                self._forward(method, body, fault.line if fault else None)

        def _forward(self, method: str, body: dict[str, Any], change: Callable[[str], str] | None) -> None:
            key = {"Authorization": self.headers.get("Authorization") or ""}
            content = json.dumps(body).encode() if method == "POST" else None
            with httpx.stream(
                method,
                upstream + self.path,
                content=content,
                headers={**key, "Content-Type": "application/json"},
                timeout=120,
            ) as response:
                self._head(response.status_code)
                try:
                    for line in response.iter_lines():
                        self.wfile.write((change(line) if change else line).encode() + b"\n")
                        self.wfile.flush()
                except OSError:
                    return  # the client left, so the server is left as well

        def _head(self, status: int) -> None:
            self.send_response(status)
            self.end_headers()

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *args: object) -> None: ...

    http = Server(("127.0.0.1", 0), Handler)
    proxy = Proxy(f"http://127.0.0.1:{http.server_port}")
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()

    def die() -> None:
        dead.set()
        http.shutdown()
        http.server_close()

    proxy.die = die
    try:
        yield proxy
    finally:
        http.shutdown()
        http.server_close()
