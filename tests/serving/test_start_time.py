"""What `q38 serve` does before it starts a server: no torch, and one look at the headers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from q38.checkpoint import index
from q38.checkpoint.header import Header
from q38.serving.engines import ServeOptions
from q38.serving.launch import dry_run
from q38.serving.sglang_settings import SglangSettings


def test_planning_needs_no_torch() -> None:
    code = "import sys, q38.serving.launch, q38.serving.sglang_plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_headers_are_read_once(tiny_packed: Path, tiny_ple: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    original = index.read_header

    def counted(file: Path) -> Header:
        read.append(file)
        return original(file)

    monkeypatch.setattr(index, "read_header", counted)
    settings = SglangSettings(device="cpu", context=1024)
    found = dry_run(ServeOptions(tiny_packed, tiny_ple, "sglang", port=0, sglang=settings))
    assert "plan" in found
    checkpoint = [file for file in read if file.parent == tiny_packed]
    assert len(checkpoint) == len(set(checkpoint)) > 0
