"""requant-int8: what it refuses, before the first byte is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.job import MANIFEST
from q38.quantize.requant_int8 import requant_int8
from q38.recipe.schema import parse_recipe
from tests.checkpoint.disks import small_disk
from tests.inspection.broken import clone, edit_json, edit_tensor
from tests.quantize.requant.common import ATTENTION, BASE, digests, recipe, rewrite


def test_another_source_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_source, tmp_path / "other")
    rewrite(tmp_path / "other", "lm_head.weight", lambda w: w + 1)
    with pytest.raises(InputError, match=r"lm_head\.weight differs between the model and the source"):
        requant_int8(model, tmp_path / "out", source=tmp_path / "other", recipe=recipe())
    assert not (tmp_path / "out").exists()


def test_another_recipe_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    other = parse_recipe({**BASE, "quantize": {"bits": {"experts": 2, "gdn_in": 4}}})
    with pytest.raises(InputError, match="is stored at 8 bits, the recipe says 4"):
        requant_int8(model, tmp_path / "out", source=tiny_source, recipe=other)


def test_a_model_that_was_already_repacked_is_refused(
    result: tuple[Path, dict[str, Any]], tiny_source: Path, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="is stored at 8 bits, the recipe says 16"):
        requant_int8(result[0], tmp_path / "out", source=tiny_source, recipe=recipe())


def test_a_source_offered_as_the_model_is_refused(tiny_source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"quantization_config\.quant_method is 'absent', not 'auto-round'"):
        requant_int8(tiny_source, tmp_path / "out", source=tiny_source, recipe=recipe())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("group_size", 64),
        ("group_size", -1),
        ("group_size", "128"),
        ("sym", False),
        ("sym", 1),
        ("packing_format", "auto_round:auto_awq"),
        ("quant_method", ["auto-round"]),
    ],
)
def test_a_model_packed_in_another_way_is_refused(
    key: str, value: object, model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    root = clone(model, tmp_path / "model")
    edit_json(root / "config.json", lambda c: c["quantization_config"].update({key: value}))
    with pytest.raises(InputError, match=rf"quantization_config\.{key} is .*, not "):
        requant_int8(root, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_quantization_config_mapping_is_refused(
    model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    root = clone(model, tmp_path / "model")
    edit_json(root / "config.json", lambda c: c.update(quantization_config=[1]))
    with pytest.raises(InputError, match="quant_method is 'absent'"):
        requant_int8(root, tmp_path / "out", source=tiny_source, recipe=recipe())


def test_fp8_codes_without_scales_are_no_source(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    source = clone(tiny_source, tmp_path / "source")
    edit_tensor(source, f"{ATTENTION}.k_proj.weight", lambda w: w.to(torch.float8_e4m3fn))
    with pytest.raises(InputError, match=r"k_proj\.weight is fp8 and has no weight_scale_inv"):
        requant_int8(model, tmp_path / "out", source=source, recipe=recipe())


@pytest.mark.parametrize("part", ["qzeros", "scales"])
def test_a_packed_matrix_whose_parts_do_not_fit_is_refused(
    part: str, model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    root = clone(model, tmp_path / "model")
    edit_tensor(root, f"model.language_model.layers.0.mlp.experts.3.up_proj.{part}", torch.Tensor.flatten)
    with pytest.raises(InputError, match="is stored at 0 bits, the recipe says 2"):
        requant_int8(root, tmp_path / "out", source=tiny_source, recipe=recipe())


def test_a_source_without_rows_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    source = clone(tiny_source, tmp_path / "source")
    edit_tensor(source, f"{ATTENTION}.k_proj.weight", lambda w: w.new_empty(0, w.shape[1]))
    with pytest.raises(InputError, match=r"k_proj\.weight differs between the model and the source"):
        requant_int8(model, tmp_path / "out", source=source, recipe=recipe())


def test_a_read_only_target_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", read_only=True) as disk,
        pytest.raises(InputError, match="Read-only"),
    ):
        requant_int8(model, disk / "out", source=tiny_source, recipe=recipe())


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", ["model", "source"])
def test_an_input_is_refused_as_output_and_untouched(
    model: Path, tiny_source: Path, tmp_path: Path, name: str, fresh: bool
) -> None:
    inputs = {"model": clone(model, tmp_path / "model"), "source": clone(tiny_source, tmp_path / "source")}
    before = digests(tmp_path)
    with pytest.raises(InputError, match="would share a directory with an input"):
        requant_int8(inputs["model"], inputs[name], source=inputs["source"], recipe=recipe(), fresh=fresh)
    assert digests(tmp_path) == before


def test_a_weight_that_is_not_a_number_is_refused(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    def poisoned(weight: torch.Tensor) -> torch.Tensor:
        weight[-1, -1] = float("nan")
        return weight

    for name, origin in (("source", tiny_source), ("model", model)):
        shutil.copytree(origin, tmp_path / name)
        (tmp_path / name / MANIFEST).unlink()
        rewrite(tmp_path / name, "lm_head.weight", poisoned)
    with pytest.raises(InputError, match=r"lm_head\.weight holds a value that is infinite, not a number"):
        requant_int8(tmp_path / "model", tmp_path / "out", source=tmp_path / "source", recipe=recipe())
