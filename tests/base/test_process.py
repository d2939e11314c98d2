"""A child ends with the process that started it."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")

_CHILD = """
import os, sys, time
from q38.base.process import end_with_parent
end_with_parent(int(sys.argv[1]) or os.getppid())
print(os.getpid(), flush=True)
time.sleep(60)
"""
_PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {_CHILD!r}, "0"], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline(), flush=True)
time.sleep(60)
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    while child.is_running() and child.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_a_child_whose_parent_died_before_the_call_ends_at_once() -> None:
    gone = psutil.Process().pid  # this test is the parent, so any other number is a parent that died
    done = subprocess.run([sys.executable, "-c", _CHILD, str(gone + 1)], capture_output=True, timeout=30)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stdout == b""
