"""The command line, called in this process as a shell would call it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from q38.cli.app import main


@dataclass(frozen=True)
class Result:
    """Exit code and output of one call."""

    code: int
    out: str
    err: str


@pytest.fixture
def q38(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    def call(*args: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["q38", *map(str, args)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capfd.readouterr()
        code = ended.value.code
        return Result(code if isinstance(code, int) else 0, out, err)

    return call
