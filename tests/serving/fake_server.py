"""A scripted chat server, to provoke the faults that a real one cannot be made to have."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# A step is text to send as it is, or seconds to wait. DROP closes the connection at once.
Step = str | float
DROP = "\0drop"
Script = Callable[[dict[str, Any]], Iterable[Step]]


class FakeServer:
    """What the server was asked (`requests`), and how it answers (`script`, or `error` = status and body; `pages` for GET)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requests: list[dict[str, Any]] = []
        self.script: Script = lambda body: answer(["a", "b"], body)
        self.error: Callable[[dict[str, Any]], tuple[int, str] | None] = lambda body: None
        self.models: str = json.dumps(
            {"data": [{"id": "fake", "owned_by": "tests", "max_model_len": 100_000}]}
        )
        self.keys: list[str | None] = []
        self.pages: dict[str, Callable[[], str]] = {}
        self.encoding = "utf-8"  # of what `script` sends


@contextmanager
def fake_server() -> Iterator[FakeServer]:
    """Run one on a free port of 127.0.0.1."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None: ...

        def do_GET(self) -> None:
            server.keys.append(self.headers.get("Authorization"))
            page = server.pages.get(self.path, lambda: "{}")
            self._send(200, server.models if self.path == "/v1/models" else page())

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.requests.append(body)
            error = server.error(body)
            if error is not None:
                self._send(*error)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            for step in server.script(body):
                if step == DROP:
                    return
                if isinstance(step, str):
                    self.wfile.write(step.encode(server.encoding))
                    self.wfile.flush()
                else:
                    time.sleep(step)

        def _send(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        server = FakeServer(f"http://127.0.0.1:{http.server_port}")
        thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()


def chunk(text: str | None = None, finish: str | None = None, **delta: Any) -> str:
    """One server-sent event with a choice."""
    if text is not None:
        delta["content"] = text
    return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})


def event(document: dict[str, Any]) -> str:
    return f"data: {json.dumps(document)}\n\n"


def prompt_tokens(body: dict[str, Any]) -> int:
    """The fake tokenizer: 7 tokens of template, one for 4 ASCII characters, one for each other byte."""
    text = body["messages"][-1]["content"]
    plain = sum(c.isascii() for c in text)
    return 7 + plain // 4 + len(text.encode()) - plain


def usage(body: dict[str, Any], completion: int) -> str:
    prompt = prompt_tokens(body)
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def answer(
    pieces: Iterable[str],
    body: dict[str, Any],
    *,
    first: float = 0.0,
    between: float = 0.0,
    tokens_per_piece: int = 1,
) -> Iterator[Step]:
    """A whole good answer: waits, pieces, finish reason, usage, [DONE]."""
    yield chunk(role="assistant")
    yield first
    count = 0
    for piece in pieces:
        if count:
            yield between
        yield chunk(piece)
        count += tokens_per_piece
    yield between
    yield chunk(finish="length")
    yield usage(body, count)
    yield "data: [DONE]\n\n"
