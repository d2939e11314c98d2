"""The process that reads expert rows while SGLang imports its modules (`q38.residency.early`), and how it is found.

The server's first process starts it, so it lies in the same process group, and in the same systemd scope where there is one.
It ends with that process (its stdin is a pipe from there), with the one that took its rows, or with the group. The socket has a name in the
abstract namespace: no file is left behind.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from q38.base import settings
from q38.base.settings import cpu_count
from q38.base.units import MIB
from q38.checkpoint.index import Checkpoint
from q38.model.shape import ModelShape
from q38.residency.early import EarlyReader, Work, peer
from q38.residency.pool import HostLimits, check_available
from q38.residency.shards import expert_layout, plan_reads
from q38.sglang_ext.clock import at
from q38.sglang_ext.options import ExtensionOptions, given
from q38.sglang_ext.row_plan import KEEP, plan_rows

AHEAD = 256 * MIB  # device rows that wait for the server, and for whatever keeps it from taking them


def address(options: ExtensionOptions) -> bytes | None:
    """Where the reader of a server listens; None where none is wanted."""
    if not options.early_rows or options.control is None or options.device_rows is None:
        return None
    return b"\0" + os.fsencode(options.control) + b".rows"


def start(options: ExtensionOptions, *, ahead: int = AHEAD) -> None:
    """Start the reader, if one is wanted. Where it cannot be started, the rows are read later.

    Args:
        ahead: bytes of device rows that it may read before the server takes them, beside the pool's free slots.
    """
    where = address(options)
    if where is None:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(where)
            listener.listen(1)
            reader = subprocess.Popen(
                [sys.executable, "-m", "q38.sglang_ext.early_rows", str(listener.fileno()), str(ahead)],
                stdin=subprocess.PIPE,
                pass_fds=[listener.fileno()],
                env=settings.child_env(drop=("Q38_API_KEY",)),
            )
    except OSError as error:
        sys.stderr.write(f"q38 rows: no early reader ({error})\n")
        return
    # Its end is of no interest, but somebody must take note of it. The thread also keeps the pipe.
    threading.Thread(target=reader.wait, name="q38-early", daemon=True).start()


def main(arguments: Sequence[str]) -> None:
    """The reader's process."""
    threading.Thread(target=_end_with_parent, name="parent-watchdog", daemon=True).start()
    options = given()
    assert options is not None
    listener = socket.socket(fileno=int(arguments[0]))
    listener.listen(1)  # its own process is what clients see from now on
    _say("reader started")
    reader = EarlyReader(
        lambda: _work(options), check=_check, say=_say, ahead=int(arguments[1]), threads=cpu_count()
    )
    while True:
        connection, _ = listener.accept()
        with connection:
            if peer(connection)[1] != os.geteuid():
                continue
            listener.close()
            with suppress(OSError, ValueError):
                reader.serve(connection)
        os._exit(0)  # threads may still be reading


def _work(options: ExtensionOptions) -> Work:
    checkpoint = Checkpoint.open(options.model)
    layout, shape = expert_layout(checkpoint), ModelShape.from_config(checkpoint.config)
    reads = plan_reads(checkpoint, layout)
    assert options.device_rows is not None
    return Work(layout, reads, plan_rows(shape, layout, options, options.device_rows).pool)


def _check(nbytes: int) -> None:
    check_available(nbytes, HostLimits.probe(), KEEP)


def _say(what: str) -> None:
    sys.stderr.write(f"q38 rows: {at(what)}\n")
    sys.stderr.flush()


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
