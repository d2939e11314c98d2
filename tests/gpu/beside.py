"""Code that imports SGLang, run in a process of its own: SGLang changes transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import util
from typing import Any

import pytest

from q38.base.settings import child_env


def run(code: str) -> dict[str, Any]:
    """The JSON object that `code` prints last; skips the test where SGLang is not installed or it names what is "absent"."""
    if util.find_spec("sglang") is None:
        pytest.skip("no sglang")
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=child_env(drop=("Q38_SGLANG", "SGLANG_PLATFORM")),
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if "absent" in found:
        pytest.skip(f"SGLang's kernels do not run here ({found['absent']})")
    return found
