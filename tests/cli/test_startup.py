"""The command line starts light, and completes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HEAVY = (
    "torch",
    "transformers",
    "auto_round",
    "numpy",
    "matplotlib",
    "safetensors",
    "httpx",
    "fastapi",
    "sglang",
)


@pytest.mark.parametrize("arguments", [["--help"], ["quantize", "--help"], ["run", "--help"]], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\n"
        f"sys.argv = ['q38', *{arguments!r}]\n"
        "from q38.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        f"print('HEAVY', [m for m in {HEAVY!r} if m in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "HEAVY []"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_completion_script_is_printed(shell: str) -> None:
    env = {**os.environ, "_Q38_COMPLETE": f"source_{shell}"}
    done = subprocess.run([sys.executable, "-m", "q38"], env=env, capture_output=True, text=True, timeout=60)
    assert "_Q38_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("words", "expected"),
    [("q38 qua", "quantize"), ("q38 quantize --rec", "--recipe"), ("q38 oracle ch", "check")],
)
def test_words_are_completed(words: str, expected: str) -> None:
    env = {
        **os.environ,
        "_Q38_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(words.count(" ")),
    }
    done = subprocess.run([sys.executable, "-m", "q38"], env=env, capture_output=True, text=True, timeout=60)
    assert expected in done.stdout.split()
