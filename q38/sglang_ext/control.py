"""Change the rows of a running server: one JSON line in, one out, over a Unix socket of the process with the model.

The HTTP server of SGLang is another process; `routes.py` puts this behind its address and its API key.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base.errors import InputError, Q38Error, ResourceError

if TYPE_CHECKING:
    from q38.sglang_ext.residency import ExpertRows

logger = logging.getLogger(__name__)
_LONGEST = 2**16  # bytes of a request
_PATIENCE_S = 5.0  # for a client that has connected to send its request, and to take its answer


class ControlServer:
    """Answers requests one after the other, on a thread of its own."""

    def __init__(self, rows: ExpertRows, path: Path) -> None:
        self.rows = rows
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.listen()
        threading.Thread(target=self._serve, name="q38-control", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            try:
                connection.settimeout(_PATIENCE_S)
                with connection, connection.makefile("rwb") as stream:
                    stream.write(json.dumps(handle(self.rows, stream.readline(_LONGEST))).encode() + b"\n")
            except OSError:
                logger.warning("q38: the client left before its answer")


def handle(rows: ExpertRows, line: bytes) -> dict[str, Any]:
    """Carry out one request. Never raises: a refusal is part of the answer."""
    try:
        request = json.loads(line)
        if not isinstance(request, dict):
            raise ValueError("not an object")
    except ValueError as error:
        return InputError(f"not a JSON object ({error})", where="control").to_dict()
    try:
        with rows.gate.move():
            return {"result": _act(rows, request), "status": rows.status()}
    except Q38Error as error:
        return error.to_dict()
    except Exception as error:  # the thread that answers must live
        logger.exception("q38: a control request failed")
        return Q38Error(
            f"internal error: {type(error).__name__}: {error}",
            where="control",
            remedy="read the server's log",
        ).to_dict()


def ask(path: Path, request: dict[str, Any], *, timeout_s: float = 60.0) -> dict[str, Any]:
    """Send one request to the process with the model.

    Raises:
        ResourceError: nobody answers.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.settimeout(timeout_s)
            s.connect(str(path))
            s.sendall(json.dumps(request).encode() + b"\n")
            with s.makefile("rb") as stream:
                answer: dict[str, Any] = json.loads(stream.readline())
                return answer
    except (OSError, ValueError) as error:
        raise ResourceError(f"the model's process does not answer ({error})", where=path) from None


def _act(rows: ExpertRows, request: dict[str, Any]) -> Any:
    name = request.get("action")
    if name == "status":
        return None
    if name == "routing":
        return rows.routing()
    if not isinstance(name, str) or name not in _ACTIONS:
        known = ", ".join(("status", "routing", *_ACTIONS))
        raise InputError(f"unknown action {name!r}", where="control", remedy=f"known: {known}")
    key, kind, act = _ACTIONS[name]
    value = request.get(key)
    if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
        what = "a file name" if kind is str else "a number from 0 on"
        raise InputError(f"{name} needs {key}, {what}", where="control")
    rows.traffic.collect()  # what was read so far was read where the rows lie now
    return act(rows, value)


def _place(rows: ExpertRows, profile: str) -> None:
    path = Path(profile)
    if not path.is_file():  # a pipe would keep the rows' lock for as long as nobody writes
        raise InputError("no such file", where=path, remedy="make it with q38 build-placement")
    rows.place_by(path)


_Action = tuple[str, type, Callable[..., Any]]
_ACTIONS: dict[str, _Action] = {
    "grow": ("rows", int, lambda rows, n: rows.cache.grow(n)),
    "shrink": ("rows", int, lambda rows, n: rows.cache.shrink(n)),
    "fill": ("reserve", int, lambda rows, n: rows.cache.fill(n)),
    "free": ("bytes", int, lambda rows, n: rows.cache.free(n)),
    "place": ("profile", str, _place),
}
