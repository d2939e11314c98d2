"""A source that is no complete release is refused before the first byte of the output."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.model.names import LAYERS
from q38.quantize.driver import quantize
from q38.quantize.sources import require_source
from q38.recipe.schema import Recipe
from tests.measure.packed import edit_json, edit_tensor


@pytest.fixture
def rtn(vary: Callable[..., Recipe]) -> Recipe:
    return vary(experts={"method": "rtn"})


@pytest.fixture
def source(tiny_source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_source, tmp_path / "source"))


def refused(source: Path, recipe: Recipe, out: Path, match: str) -> None:
    with pytest.raises(InputError, match=match):
        quantize(source, out, recipe)
    assert not out.exists()


@pytest.mark.parametrize("keep", [{}, {"mtp": "keep"}, {"mtp": "keep", "vision": "keep"}])
@pytest.mark.parametrize("layout", ["tiny_source", "tiny_source_fp8"])
def test_both_releases_are_complete(
    layout: str, keep: dict[str, str], request: pytest.FixtureRequest, vary: Callable[..., Recipe]
) -> None:
    require_source(Checkpoint.open(request.getfixturevalue(layout)), vary(**keep))


@pytest.mark.parametrize(
    "name",
    [f"{LAYERS}.0.linear_attn.A_log", f"{LAYERS}.1.mlp.gate.weight", f"{LAYERS}.2.mlp.experts.down_proj"],
)
def test_a_tensor_that_would_be_copied_or_packed_is_missed(
    name: str, source: Path, rtn: Recipe, tmp_path: Path
) -> None:
    edit_tensor(source, name, lambda tensor: None)
    wanted = name.replace("experts.down_proj", r"experts\.0\.down_proj\.weight")
    refused(source, rtn, tmp_path / "out", rf"tensor {wanted} is missing")


def test_what_the_recipe_drops_may_be_absent_and_what_it_keeps_may_not(
    source: Path, rtn: Recipe, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    edit_tensor(source, "mtp.fc_hidden.weight", lambda tensor: None)
    require_source(Checkpoint.open(source), rtn)
    kept = vary(experts={"method": "rtn"}, mtp="keep")
    refused(
        source,
        kept,
        tmp_path / "out",
        r"mtp\.fc_hidden\.weight is missing\. .* or set quantize\.mtp to drop",
    )


def halved(config: dict[str, Any]) -> None:
    config["text_config"]["num_experts"] //= 2


def fewer(config: dict[str, Any]) -> None:
    text = config["text_config"]
    text["num_hidden_layers"] = 3
    text["layer_types"] = text["layer_types"][:3]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (halved, r"mlp\.gate\.weight is \[16, 256\], config\.json gives \[8, 256\]"),
        (fewer, rf"tensor {LAYERS}\.3\..* has no place in the model that config\.json describes"),
    ],
)
def test_a_config_of_another_model_is_refused(
    change: Callable[[dict[str, Any]], None], match: str, source: Path, rtn: Recipe, tmp_path: Path
) -> None:
    edit_json(source / "config.json", change)
    refused(source, rtn, tmp_path / "out", match)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda w: w[:, :200].contiguous(), r"in_proj_z\.weight is \[\d+, 200\], config\.json gives"),
        (lambda w: w.to(torch.int8), r"in_proj_z\.weight is I8, a release has BF16 there"),
    ],
)
def test_a_matrix_of_another_shape_or_dtype_is_refused(
    change: Callable[[torch.Tensor], torch.Tensor], match: str, source: Path, rtn: Recipe, tmp_path: Path
) -> None:
    edit_tensor(source, f"{LAYERS}.0.linear_attn.in_proj_z.weight", change)
    refused(source, rtn, tmp_path / "out", match)


def test_scales_that_fit_no_matrix_are_refused(tiny_source_fp8: Path, rtn: Recipe, tmp_path: Path) -> None:
    source = Path(shutil.copytree(tiny_source_fp8, tmp_path / "source"))
    scales = f"{LAYERS}.0.mlp.experts.3.up_proj.weight_scale_inv"
    edit_tensor(source, scales, lambda s: s.repeat(1, 512))
    refused(source, rtn, tmp_path / "out", r"up_proj\.weight_scale_inv \[1, \d+\] scales no fp8 matrix")


def test_a_model_that_is_quantized_already_is_named_as_such(
    tiny_packed: Path, rtn: Recipe, tmp_path: Path
) -> None:
    refused(
        tiny_packed,
        rtn,
        tmp_path / "out",
        r"is already quantized \(auto-round\)\. Give the bf16 or FP8 release",
    )


def spoiled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(weight: torch.Tensor) -> torch.Tensor:
        weight = weight.clone()
        weight.view(-1)[-1] = value
        return weight

    return change


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e30])
@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("linear_attn.in_proj_z.weight", r"linear_attn\.in_proj_z"),
        ("mlp.experts.down_proj", r"experts\.15\.down_proj"),
    ],
)
def test_a_weight_that_no_scale_can_hold_is_the_sources_fault(
    value: float, name: str, module: str, source: Path, rtn: Recipe, tmp_path: Path
) -> None:
    edit_tensor(source, f"{LAYERS}.0.{name}", spoiled(value))
    with pytest.raises(InputError, match=rf"{module} holds a weight that is .* q38 inspect --deep"):
        quantize(source, tmp_path / "out", rtn)


def test_so_it_is_where_the_expert_is_tuned(
    source: Path, tiny_ple: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    edit_tensor(source, f"{LAYERS}.0.mlp.experts.down_proj", spoiled(1e30))
    with pytest.raises(InputError, match=r"experts\.15\.down_proj holds a weight that is"):
        quantize(source, tmp_path / "out", vary(experts={"method": "opt-rtn"}), ple=tiny_ple, blocks="0")
