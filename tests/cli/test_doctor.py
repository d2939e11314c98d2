"""q38 doctor: a lack is reported with its remedy, and is an error only when it is asked about."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from q38.cli.app import VERBS
from q38.serving import doctor, requirements
from q38.serving.machine import Gpu, Machine, probe
from tests.cli.conftest import Result

Cli = Callable[..., Result]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """This machine without a GPU, SGLang or CUDA."""
    here = probe()
    machine = replace(
        here, gpus=(), torch_build="cpu", packages={**here.packages, "sglang": None, "triton": None}
    )
    monkeypatch.setattr(doctor, "probe", lambda path=None: machine)
    return machine


def test_every_verb_is_examined() -> None:
    verbs = {name.replace("_", "-") for name in VERBS}
    assert verbs <= set(doctor.VERBS)
    assert {name.split()[0] for name in doctor.VERBS} == verbs


def test_lacks_are_no_error(bare: Machine, q38: Cli) -> None:
    result = q38("doctor")
    assert result.code == 0
    assert "lacks: a CUDA GPU" in result.out
    assert result.err == ""


def test_every_lack_has_a_remedy_beside_it(bare: Machine, q38: Cli) -> None:
    lines = q38("doctor").out.splitlines()
    lacks = [i for i, line in enumerate(lines) if line.startswith(("lacks:", "advice:"))]
    assert lacks
    assert all(lines[i + 2].startswith("  remedy: ") and len(lines[i + 2]) > 12 for i in lacks)


def test_json_has_machine_and_verbs(bare: Machine, q38: Cli) -> None:
    document = json.loads(q38("doctor", "--json").out)
    assert document["machine"]["gpus"] == []
    assert document["verbs"]["tune-triton"]["ready"] is False
    needs = document["verbs"]["tune-triton"]["needs"]
    assert {n["need"]: n["ok"] for n in needs}["a CUDA GPU"] is False
    assert document["verbs"]["inspect"]["ready"] is True


@pytest.mark.parametrize("flag", [[], ["--json"]], ids=["text", "json"])
def test_a_required_verb_that_lacks_something_is_exit_code_3(
    bare: Machine, q38: Cli, flag: list[str]
) -> None:
    result = q38("doctor", "--require", "tune-triton", *flag)
    assert result.code == 3
    assert "CUDA GPU" in result.err
    assert "nvidia-smi" in result.err


def test_a_required_verb_that_has_everything_is_exit_code_0(q38: Cli) -> None:
    result = q38("doctor", "--require", "inspect")
    assert result.code == 0
    assert "inspect" in result.out
    assert "quantize" not in result.out


def test_an_unknown_verb_is_exit_code_2(q38: Cli) -> None:
    assert q38("doctor", "--require", "servee").code == 2


def test_a_gpu_and_its_link_are_shown(monkeypatch: pytest.MonkeyPatch, q38: Cli) -> None:
    gpu = Gpu("NVIDIA RTX PRO 4000", "12.0", 24 * 2**30, 23 * 2**30, "gen 5 x16", "580.65")
    here = replace(probe(), gpus=(gpu,), torch_build="cu130")
    monkeypatch.setattr(doctor, "probe", lambda path=None: here)
    out = q38("doctor").out
    assert "compute capability 12.0" in out
    assert "gen 5 x16" in out
    assert "lacks: a CUDA GPU" not in out


def test_a_package_in_another_version_is_a_lack(monkeypatch: pytest.MonkeyPatch, q38: Cli) -> None:
    real = requirements.installed
    monkeypatch.setattr(requirements, "installed", lambda p: "4.0.0" if p == "transformers" else real(p))
    result = q38("doctor", "--require", "serve")
    assert result.code == 3
    assert "transformers==" in result.err
    assert "4.0.0" in result.err
    assert 'pip install "q38[serve]"' in result.err


def test_a_path_that_is_not_there_is_exit_code_2(q38: Cli, tmp_path: Path) -> None:
    result = q38("doctor", "--path", tmp_path / "nope")
    assert result.code == 2
    assert "nope: no such file or directory" in result.err
    assert q38("doctor", "--path", tmp_path).code == 0
