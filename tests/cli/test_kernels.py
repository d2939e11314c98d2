"""q38 bench kernels and q38 tune-triton as a user without a GPU meets them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.cli.conftest import Result

Cli = Callable[..., Result]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA GPU")


@pytest.mark.parametrize("verb", [("bench", "kernels"), ("tune-triton",)])
def test_without_a_gpu_both_verbs_end_with_3_and_say_what_is_missing(
    q38: Cli, verb: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = q38(*verb)
    assert result.code == 3
    assert "no CUDA GPU" in result.err
    assert len(result.err.strip().splitlines()) == 1
    assert not any(tmp_path.iterdir())


def test_a_dry_run_lists_the_units_of_the_chosen_kernels(q38: Cli) -> None:
    result = q38("tune-triton", "--kernels", "int8", "--dry-run", "--json")
    assert result.code == 0
    units = json.loads(result.out)["units"]
    assert {unit[0] for unit in units} == {"int8"}
    assert [10240, 320] in [[u[1]["inputs"], u[1]["outputs"]] for u in units]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("tune-triton", "nowhere"), "config.json"),
        (("tune-triton", "--kernels", "moe"), "--kernels"),
        (("tune-triton", "--layers", "0"), "--layers"),
        (("bench", "kernels", "nowhere"), "config.json"),
        (("bench", "kernels", "--host-share", "2"), "--host-share"),
        (("bench", "kernels", "--trace", "nowhere.safetensors"), "nowhere.safetensors"),
    ],
)
def test_bad_arguments_end_with_2_in_one_line(q38: Cli, arguments: tuple[str, ...], word: str) -> None:
    result = q38(*arguments)
    assert result.code == 2
    assert word in result.err
    assert len(result.err.strip().splitlines()) == 1
