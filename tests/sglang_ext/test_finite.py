"""A value that is not finite is traced to the module that made it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from q38.base.errors import Q38Error
from q38.checkpoint.index import Checkpoint
from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings
from q38.sglang_ext.finite import FiniteCheck
from tests.sglang_ext.conftest import missing

SETTINGS = SglangSettings(device="cpu", context=256, check_finite=True)


class Doubling(nn.Module):
    """Returns a tuple, as SGLang's layers do."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x * 2, None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), Doubling(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.second(self.first(x))[0])
        return out


@pytest.fixture
def model() -> Model:
    made = Model()
    nn.init.eye_(made.first.weight)
    nn.init.zeros_(made.first.bias)
    return made


def test_the_module_that_made_it_is_named_and_not_those_that_passed_it_on(
    model: Model, caplog: pytest.LogCaptureFixture
) -> None:
    check = FiniteCheck(model, "last")
    check.begin(3)
    model(torch.full((3, 4), 3e38))  # finite until it is doubled
    told = "output of second in a step of 3 tokens"
    assert check.to_dict() == {"prompt_steps": 1, "not_finite": 1, "first": told}
    assert f"q38: not finite: {told}" in caplog.text


def test_steps_that_are_not_looked_at_and_sound_ones_say_nothing(model: Model) -> None:
    check = FiniteCheck(model, "last")
    model(torch.full((1, 4), torch.nan))  # before any step, and a decode step
    check.begin(0)
    model(torch.full((1, 4), torch.nan))
    check.begin(2)
    model(torch.ones(2, 4))
    model(torch.full((1, 4), torch.nan))  # the step is over
    assert check.to_dict() == {"prompt_steps": 1, "not_finite": 0, "first": None}


def test_a_server_that_a_nan_ends_names_the_broken_layer(
    tiny_packed: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    if why := missing():
        pytest.skip(why)
    broken = Path(shutil.copytree(tiny_packed, tmp_path / "model"))
    spoil(broken, "layers.2.linear_attn.norm.weight")
    with (
        pytest.raises(
            Q38Error, match=r"not finite: output of model\.layers\.2\.linear_attn\.norm in a step of"
        ),
        running_server(broken, ple=tiny_ple, name="t", engine="sglang", sglang=SETTINGS),
    ):
        pass


def spoil(model: Path, ending: str) -> None:
    """Make one value of a bf16 tensor NaN."""
    tensor = next(t for name, t in Checkpoint.open(model).tensors.items() if name.endswith(ending))
    with tensor.file.open("r+b") as out:
        out.seek(tensor.begin)
        out.write(b"\xc0\x7f")
