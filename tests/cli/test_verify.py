"""q38 verify on the command line: what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Result

Cli = Callable[..., Result]


@pytest.mark.parametrize("device", ["tpu", "cuda:", "0", "CUDA"])
def test_an_unknown_device_is_exit_code_2(q38: Cli, tiny_packed: Path, device: str) -> None:
    result = q38("verify", tiny_packed, "--device", device)
    assert result.code == 2
    assert f"--device: '{device}' is no device" in result.err
    assert result.out == ""


@pytest.mark.parametrize("device", ["cuda", "cuda:64"])
def test_a_gpu_that_is_not_there_is_exit_code_3(
    q38: Cli, tiny_packed: Path, tiny_source: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = q38("verify", tiny_packed, "--source", tiny_source, "--device", device)
    assert result.code == 3
    assert "is not there, this machine has 0 for torch" in result.err
    assert result.out == ""
