"""The scripts in examples/ and the CI recipe call commands and options that exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cli.commands import COMMANDS, options

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(ROOT.glob("examples/*.sh"))
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))


def calls(text: str) -> list[list[str]]:
    """The words after `q38` of every call in a shell script."""
    lines = re.findall(r"^\s*(?:\S*/)?q38 ([^|>\n]*)", text.replace("\\\n", " "), flags=re.MULTILINE)
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_a_script_is_valid_and_stops_at_the_first_failure(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    assert "set -euo pipefail" in script.read_text()
    assert script.stat().st_mode & 0o111


@pytest.mark.parametrize("file", [*SCRIPTS, *WORKFLOWS], ids=lambda p: p.name)
def test_every_command_and_option_exists(file: Path) -> None:
    found = calls(file.read_text("utf-8"))
    assert found
    for words in found:
        path = next((p for p in (" ".join(words[:2]), words[0]) if p in COMMANDS), None)
        assert path is not None, f"{file.name}: q38 {' '.join(words)}"
        assert {w for w in words if w.startswith("-")} <= options(path), f"{file.name}: q38 {' '.join(words)}"


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda p: p.name)
def test_a_workflow_runs_what_is_in_the_repository(file: Path) -> None:
    jobs = yaml.safe_load(file.read_text("utf-8"))["jobs"].values()
    commands = [step["run"] for job in jobs for step in job["steps"] if "run" in step]
    named = [
        word for command in commands for word in command.split() if word in (".ci/run", "examples/release.sh")
    ]
    assert named == [".ci/run", "examples/release.sh"]
    assert all((ROOT / name).exists() for name in named)
