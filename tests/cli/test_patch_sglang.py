"""q38 patch-sglang: this release has no extension, and every action says so."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from q38.serving import requirements
from tests.cli.conftest import Result

Cli = Callable[..., Result]
ACTIONS = ["check", "enable", "disable", "verify", "export-patch", "apply", "revert"]


def run(q38: Cli, action: str) -> Result:
    return q38("patch-sglang", action, *(["-o", "x.diff"] if action == "export-patch" else []))


@pytest.mark.parametrize("action", ACTIONS)
def test_without_sglang_every_action_says_how_to_get_it(
    q38: Cli, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "installed", lambda package: None)
    result = run(q38, action)
    assert result.code == 3
    assert 'pip install "q38[sglang]"' in result.err


@pytest.mark.parametrize("action", ACTIONS)
def test_with_sglang_every_action_names_the_version_and_the_lack(
    q38: Cli, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requirements, "installed", lambda package: "0.5.23")
    result = run(q38, action)
    assert result.code == 3
    assert "0.5.23" in result.err
    assert "no extension" in result.err
