"""A process whose interpreter is started, and has imported what it needs, before there is anything to run in it.

`multiprocessing` spawns a process as a fresh interpreter that reads two pickles from a pipe, which import the modules
of what is to run. Here that interpreter was started earlier and has imported them meanwhile. It then gets what a
spawned one inherits, in one message over a Unix socket: descriptors (the pipe, the sentinel, the resource tracker's,
those in the arguments) and, as JSON, their numbers and the variables of the environment that were set meanwhile.
From there on `multiprocessing.spawn.spawn_main` runs as ever.

Whatever else a process inherits must not have changed in between, else the interpreter is ended and the standard one started.
"""

from __future__ import annotations

import fcntl
import importlib
import io
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import popen_spawn_posix, reduction, resource_tracker, spawn, util
from multiprocessing.context import set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from q38.base import settings
from q38.sglang_ext.clock import at

_MESSAGE = 1 << 20  # bytes; a socket's buffer is smaller, and a message that it cannot hold is not sent
_DESCRIPTORS = 64
_FORKING = "--multiprocessing-fork"  # spawn_main runs only with it


class Unanswered(Exception):
    """The interpreter is gone, or is not what would be started now."""


@dataclass(frozen=True)
class Inherited:
    """What a process gets from the one that starts it."""

    command: tuple[str, ...]
    directory: str
    cores: frozenset[int]
    limits: Mapping[str, tuple[int, int]]
    environment: Mapping[str, str]

    @classmethod
    def now(cls) -> Inherited:
        """What one would get that were started now."""
        names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
        return cls(
            (os.fsdecode(spawn.get_executable()), *util._args_from_interpreter_flags()),  # type: ignore[attr-defined]
            str(Path.cwd()),
            frozenset(os.sched_getaffinity(0)),
            {name: resource.getrlimit(getattr(resource, name)) for name in names},
            settings.child_env(),
        )

    def changes(self, now: Inherited, carried: Set[str]) -> dict[str, str]:
        """Variables to bring over, name -> value.

        Args:
            carried: variables that nothing reads before they are brought over.

        Raises:
            Unanswered: something else has changed; the message names it.
        """
        for what in ("command", "directory", "cores", "limits"):
            if getattr(self, what) != getattr(now, what):
                raise Unanswered(f"its {what} differ" if what.endswith("s") else f"its {what} differs")
        before, after = self.environment, now.environment
        changed = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
        if others := sorted(name for name in changed if name not in carried or name not in after):
            raise Unanswered(f"changed since: {', '.join(others)}")
        return {name: after[name] for name in sorted(changed)}


class Waiting:
    """An interpreter that waits for a process to run, seen from the process that started it.

    Start it from the thread that would start the process: the kernel's parent-death signal is about threads.

    Args:
        name: what log lines call it.
        preload: what it does meanwhile: modules to import, or "module:function" to call.
        without: modules that must not be imported by then, since they read variables of `carried`.
        carried: variables of the environment that are brought over.
    """

    def __init__(
        self,
        name: str,
        preload: Sequence[str],
        *,
        without: Sequence[str] = (),
        carried: Set[str] = frozenset(),
    ) -> None:
        self.name, self._carried, self._taken = name, carried, False
        self._inherited = Inherited.now()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            call = f"wait({theirs.fileno()}, {name!r}, {list(preload)!r}, {list(without)!r})"
            self.pid = util.spawnv_passfds(
                os.fsencode(spawn.get_executable()),
                _command(self._inherited.command, call),
                [theirs.fileno()],
            )

    def hand_over(self, numbers: Sequence[int]) -> None:
        """Give it the descriptors of a process: pipe, resource tracker, sentinel, those in the arguments.

        Raises:
            Unanswered: it is gone, or must not be used.
        """
        if self._taken or self._ended():
            raise Unanswered("it has ended")
        changes = self._inherited.changes(Inherited.now(), self._carried)
        message = json.dumps({"numbers": list(numbers), "environment": changes}).encode()
        try:
            socket.send_fds(self._socket, [message], list(numbers))
        except OSError as error:
            raise Unanswered(f"it does not listen ({error.strerror})") from None
        self._taken = True
        self._socket.close()

    def end(self) -> None:
        """End it, unless it runs a process by now."""
        if self._taken:
            return
        self._taken = True
        self._socket.close()
        if not self._ended():
            os.kill(self.pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def _ended(self) -> bool:
        try:
            return os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
        except ChildProcessError:  # somebody else took note of its end
            return True


_passed: dict[int, int] = {}  # descriptors in the arguments: number there -> number here


class _Passed:
    """One of them, as the pickle has it."""

    def __init__(self, number: int) -> None:
        self.number = number

    def detach(self) -> int:
        return _passed[self.number]


class Popen(popen_spawn_posix.Popen):
    """`multiprocessing`'s handle of a spawned process, which runs in an interpreter that waits for it.

    Raises:
        Unanswered: that cannot be; nothing was started.
    """

    DupFd: ClassVar[Any] = _Passed
    _fds: list[int]

    def __init__(self, process: BaseProcess, waiting: Waiting) -> None:
        self._waiting = waiting
        super().__init__(process)

    def _launch(self, process: BaseProcess) -> None:
        """As in the class above; only the descriptors go to an interpreter that is there."""
        pickles = io.BytesIO()
        preparation = spawn.get_preparation_data(process.name)
        set_spawning_popen(self)
        try:
            reduction.dump(preparation, pickles)
            reduction.dump(process, pickles)
        finally:
            set_spawning_popen(None)
        tracker = resource_tracker.getfd()
        assert tracker is not None
        ended, sentinel = os.pipe()
        source, pipe = os.pipe()
        try:
            self._waiting.hand_over([source, tracker, sentinel, *self._fds])
        except BaseException:
            _close(ended, pipe)
            raise
        finally:
            _close(source, sentinel)
        self.pid, self.sentinel = self._waiting.pid, ended
        # The child sees by the pipe's end that this process has ended.
        self.finalizer = util.Finalize(self, _close, (ended, pipe))
        with suppress(OSError):  # nobody reads yet: a pipe that holds it all lets this process go on
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, pickles.tell())
        # Should it have ended already, its exit code says so.
        with suppress(BrokenPipeError), open(pipe, "wb", closefd=False) as file:
            file.write(pickles.getbuffer())


def wait(descriptor: int, name: str, preload: Sequence[str], without: Sequence[str]) -> NoReturn:
    """The interpreter: import, wait for what to run, run it."""
    os.set_inheritable(descriptor, False)
    # Ctrl-C ends it without a word, as long as it is nothing yet.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    begun = settings.child_env()
    received: list[tuple[dict[str, Any], list[int]]] = []
    with socket.socket(fileno=descriptor) as channel:
        # A thread, since the other process may end during the imports.
        receiver = threading.Thread(target=lambda: received.append(_receive(channel)), daemon=True)
        receiver.start()
        imported = _import(preload) and not any(module in sys.modules for module in without)
        # One of its own would clean up what this process still uses.
        usable = imported and getattr(resource_tracker, "_resource_tracker")._fd is None  # noqa: B009
        _say(f"{name}'s modules imported" if usable else f"{name}'s modules are of no use")
        receiver.join()
    document, here = received[0]
    numbers, changes = document["numbers"], document["environment"]
    passed = dict(zip(numbers[3:], here[3:], strict=True))
    if usable:
        settings.export(changes)
        _say(f"{name} takes over")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        resume(here[0], here[1], passed)
    # Received descriptors stay open, like those that a spawned process inherits.
    command = (sys.executable, *util._args_from_interpreter_flags())  # type: ignore[attr-defined]
    call = f"resume({here[0]}, {here[1]}, {passed!r})"
    os.execve(sys.executable, _command(command, call), begun | changes)


def resume(pipe: int, tracker: int, passed: Mapping[int, int]) -> NoReturn:
    """Run the process in this interpreter."""
    _passed.update(passed)
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker)
    raise AssertionError("spawn_main exits")


def _close(*descriptors: int) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _command(interpreter: Sequence[str], call: str) -> list[str]:
    function = call.partition("(")[0]
    return [*interpreter, "-c", f"from {__name__} import {function}; {call}", _FORKING]


def _import(preload: Sequence[str]) -> bool:
    """Whether that went well. What was wrong is told by the interpreter that starts in the place of this one."""
    try:
        for item in preload:
            module, _, function = item.partition(":")
            found = importlib.import_module(module)
            if function:
                getattr(found, function)()
    except (Exception, SystemExit):  # noqa: BLE001
        return False
    return True


def _receive(channel: socket.socket) -> tuple[dict[str, Any], list[int]]:
    message, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE, _DESCRIPTORS)
    if not message:
        os._exit(0)  # the other process has ended, or has no use for this one
    return json.loads(message), descriptors


def _say(what: str) -> None:
    sys.stderr.write(f"q38: {at(what)}\n")
    sys.stderr.flush()
