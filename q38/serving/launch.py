"""Start a server, wait until it really answers, stop it whatever happens."""

from __future__ import annotations

import contextlib
import itertools
import os
import shlex
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

from q38.base.errors import InputError, Q38Error, ResourceError
from q38.base.progress import SILENT, Progress, Task
from q38.serving.child import Child
from q38.serving.client import Client
from q38.serving.diagnosis import describe_end, telling_lines
from q38.serving.engines import Launch, ServeOptions
from q38.serving.preflight import preflight
from q38.serving.records import Record, default_log, remove_record, write_record
from q38.serving.sglang_settings import SglangSettings

_AHEAD = 128 * 2**10  # bytes of one request
_POLL_S = 0.2
_SETTLE_S = 5.0  # a start waits no longer for what it does not depend on


@dataclass(frozen=True)
class Server:
    """A server that has generated a token.

    model: its name in the API. pid: the server's process, which leads a process group. load_s: seconds from its
    start to the first generated token.
    """

    url: str
    engine: str
    model: str
    pid: int
    log: Path
    load_s: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "log": str(self.log), "load_s": round(self.load_s, 3)}


class Terminated(BaseException):
    """SIGTERM or SIGHUP arrived. Not an Exception, so that nothing on the way swallows it."""


@contextmanager
def running_server(
    model: Path,
    *,
    ple: Path | None = None,
    engine: str = "auto",
    host: str = "127.0.0.1",
    port: int = 0,
    name: str | None = None,
    api_key: str | None = None,
    log: Path | None = None,
    start_timeout_s: float = ServeOptions.start_timeout_s,
    sglang: SglangSettings | None = None,
    progress: Progress = SILENT,
) -> Iterator[Server]:
    """A server for the length of a `with` block. Port 0 takes a free one.

    Raises:
        InputError, ResourceError: as `preflight`; nothing was started.
        Q38Error: the server died or did not answer in time; the message says why, the exit code is the child's.
    """
    settings = sglang or SglangSettings()
    options = ServeOptions(model, ple, engine, host, port, name, api_key, log, start_timeout_s, settings)
    with _started(options, progress) as (server, _):
        yield server


def serve(
    options: ServeOptions,
    *,
    on_ready: Callable[[Server], None] = lambda server: None,
    progress: Progress = SILENT,
) -> int:
    """Serve in the foreground. Returns 0 when stopped by SIGTERM or `stop`, 130 on Ctrl-C.

    Must run in the main thread, which receives the signals.

    Raises:
        as `running_server`; also Q38Error when a ready server dies.
    """
    return foreground(_started(options, progress), on_ready)


def foreground(
    started: AbstractContextManager[tuple[Server, Child]], on_ready: Callable[[Server], None]
) -> int:
    """Watch what `started` starts until it ends or is told to; see `serve`."""
    with _termination():
        try:
            with started as (server, child):
                on_ready(server)
                while (code := child.returncode()) is None:
                    child.wait(_POLL_S)
                if code not in (0, -signal.SIGTERM):
                    raise _death(child, code, "the server died")
                return 0
        except Terminated:
            return 0
        except KeyboardInterrupt:
            return 130


def dry_run(options: ServeOptions) -> dict[str, Any]:
    """What `serve` would start, after every check and before the start."""
    options, engine = preflight(options)
    log = options.log or default_log(options.port)
    launch = engine.launch(options)
    return {
        "url": options.url,
        "engine": engine.name,
        "model": options.served_name,
        "command": shlex.join(launch.command),
        "log": str(log),
        **({"passed_over": engine.passed_over} if engine.passed_over else {}),
        **({"plan": launch.figures} if launch.figures else {}),
    }


@contextmanager
def _started(options: ServeOptions, progress: Progress) -> Iterator[tuple[Server, Child]]:
    options, engine = preflight(options)
    if engine.passed_over:
        progress.say(f"engine {engine.name}: {engine.passed_over}")
    with started_child(options, engine.name, engine.launch(options), progress) as started:
        yield started


@contextmanager
def started_child(
    options: ServeOptions,
    engine: str,
    launch: Launch,
    progress: Progress,
    *,
    listens: Callable[[Client], bool] = Client.healthy,
) -> Iterator[tuple[Server, Child]]:
    """A process that serves, for the length of a `with` block, once a token came through it.

    Args:
        listens: whether it can be asked for that token.

    Raises:
        as `running_server`, less what `preflight` refuses.
    """
    for line in launch.plan:
        progress.say(line)
    begun = time.monotonic()
    log = options.log or default_log(options.port)
    child = Child(launch.command, log=log, api_key=options.api_key, environment=launch.environment)
    record = _record(options, engine, child)
    threading.Thread(target=read_ahead, args=(launch.read_ahead,), daemon=True).start()
    try:
        write_record(record)
        with progress.task(f"starting engine {engine}", None, "s") as task:
            _wait_until_it_answers(options, child, begun + options.start_timeout_s, task, listens)
        load_s = time.monotonic() - begun
        if launch.settle is not None:
            _settle(options, child, launch.settle)
        ready = Record(**{**asdict(record), "state": "ready"})
        write_record(ready)
        record = ready
        child.forget_log()  # a failed attempt on the way to readiness explains no later death
        yield Server(options.url, engine, options.served_name, child.pid, child.log, load_s), child
    finally:
        try:
            child.stop()
        finally:
            remove_record(record)


def read_ahead(parts: Iterable[tuple[Path, int, int]]) -> None:
    """Have the kernel read parts of files into the page cache. A hint: what cannot be read, the server will report."""
    with contextlib.suppress(OSError):
        for file, group in itertools.groupby(parts, key=lambda part: part[0]):
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            try:
                for _, begin, end in group:  # a longer request the kernel cuts to the disk's read-ahead
                    for at in range(begin, end, _AHEAD):
                        os.posix_fadvise(fd, at, min(_AHEAD, end - at), os.POSIX_FADV_WILLNEED)
            finally:
                os.close(fd)


def _wait_until_it_answers(
    options: ServeOptions, child: Child, deadline: float, task: Task, listens: Callable[[Client], bool]
) -> None:
    """Until one token was generated through the HTTP API; a listening port proves nothing."""
    with Client(options.url, api_key=options.api_key or "none") as client:
        _wait(options, child, deadline, task, "to listen", lambda: listens(client))
        failure: list[Q38Error] = []
        answered = threading.Event()

        def ask() -> None:
            try:
                client.chat("Hello", model=options.served_name, max_tokens=1)
            except Q38Error as error:
                failure.append(error)
            answered.set()

        # On a thread, so that a server that dies or hangs meanwhile is noticed here.
        threading.Thread(target=ask, daemon=True).start()
        _wait(options, child, deadline, task, "for the first token", answered.is_set)
    if failure:
        raise _failed(child, f"the server does not answer: {failure[0].what}")


def _settle(options: ServeOptions, child: Child, path: str) -> None:
    """Send the engine's request after the first token; a failure becomes a line of the log."""
    try:
        with Client(options.url, api_key=options.api_key or "none", stall_s=_SETTLE_S) as client:
            client.signal(path)
    except Q38Error as error:
        with contextlib.suppress(OSError), child.log.open("a") as log:
            log.write(f"q38 serve goes on without {path}: {error}\n")


def _wait(
    options: ServeOptions, child: Child, deadline: float, task: Task, what: str, done: Callable[[], bool]
) -> None:
    while not done():
        begun = time.monotonic()
        code = child.wait(_POLL_S)
        if code is not None:
            raise _death(child, code, "the server died before it was ready")
        if begun > deadline:
            raise _failed(child, f"waited {options.start_timeout_s:.0f} s {what}")
        task.advance(time.monotonic() - begun)
        task.note(_last_line(child))


def _last_line(child: Child) -> str:
    lines = child.log_text(4096).replace("\r", "\n").split("\n")
    return next((line.strip()[:80] for line in reversed(lines) if line.strip()), "")


def _death(child: Child, code: int, what: str) -> Q38Error:
    """The error for a dead child, of the class (exit code) that the child ended with."""
    why, code = describe_end(code, child.log_text())
    kind = {2: InputError, 3: ResourceError, -signal.SIGKILL: ResourceError}.get(code, Q38Error)
    # Killed from outside, it had nothing to say: its log only tells of what it was doing, and of requests it refused.
    lines = [] if code == -signal.SIGKILL else telling_lines(child.log_text(), or_last=code >= 0)
    return _error(child, f"{what} ({why})", kind, lines)


def _failed(child: Child, what: str) -> Q38Error:
    return _error(child, what, Q38Error, telling_lines(child.log_text()))


def _error(child: Child, what: str, kind: type[Q38Error], lines: list[str]) -> Q38Error:
    told = f": {' | '.join(lines)}" if lines else ""
    return kind(f"{what}{told}".rstrip("."), remedy=f"read {child.log}")


def _record(options: ServeOptions, engine: str, child: Child) -> Record:
    with contextlib.suppress(psutil.NoSuchProcess):
        started = psutil.Process(child.pid).create_time()
        return Record(
            port=options.port,
            pid=child.pid,
            started=started,
            state="starting",
            url=options.url,
            engine=engine,
            model=options.served_name,
            directory=str(options.model.resolve()),
            log=str(child.log),
        )
    raise _death(child, child.wait(1.0) or 1, "the server died at once")


@contextmanager
def _termination() -> Iterator[None]:
    """SIGTERM and SIGHUP (the terminal closed) raise Terminated, so that `finally` blocks run."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, terminate) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
