"""In the child: end with the parent, however the parent ends."""

from __future__ import annotations

import os
import signal
import threading


def die_with_parent(fd: int = 0) -> None:
    """Kill this process group once the other end of the pipe on `fd` closes.

    The parent holds that end and never writes; the kernel closes it even on kill -9. A pipe and not
    PR_SET_PDEATHSIG: that one follows the parent's thread, and reaches no grandchildren.
    """
    threading.Thread(target=_wait, args=(fd,), name="parent-watchdog", daemon=True).start()


def die_with_parent_by_process(fd: int = 0) -> None:
    """The same from a process of its own, for a program that holds Python's lock as long as it runs.

    Call before any thread is started.
    """
    leader = os.getpid()
    if os.fork():
        return
    while os.read(fd, 4096):
        pass
    if os.getpgrp() == leader:
        os.killpg(leader, signal.SIGKILL)
    os.kill(leader, signal.SIGKILL)


def _wait(fd: int) -> None:
    while os.read(fd, 4096):
        pass
    # A process group of our own is the normal case; started by hand we share the shell's.
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
