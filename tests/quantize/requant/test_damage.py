"""requant-int8: a model or source that is not what it was is noticed, and not written out as if it were whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from q38.base.errors import InputError
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.job import MANIFEST
from q38.quantize.requant_int8 import requant_int8
from tests.inspection.broken import clone
from tests.quantize.requant.common import ATTENTION, recipe

EXPERT = "model.language_model.layers.0.mlp.experts.3.up_proj.scales"  # in a shard that is copied
BESIDE = f"{ATTENTION}.k_norm.weight"  # in a shard with matrices to re-pack
REPLACED = f"{ATTENTION}.k_proj.weight"  # not copied at all


def flip(checkpoint: Path, tensor: str, at: int) -> Path:
    """Change one bit of a tensor, `at` bytes from its start. Returns the shard."""
    info = Checkpoint.open(checkpoint).info(tensor)
    data = bytearray(info.file.read_bytes())
    data[info.begin + at] ^= 4
    info.file.unlink()  # it may be a link to the original
    info.file.write_bytes(data)
    return info.file


@pytest.mark.parametrize("tensor", [EXPERT, BESIDE])
def test_a_damaged_shard_of_the_model_is_refused_by_name(
    model: Path, tiny_source: Path, tmp_path: Path, tensor: str
) -> None:
    broken = clone(model, tmp_path / "model")
    file = flip(broken, tensor, 6)
    with pytest.raises(InputError, match="is damaged: sha256 is") as caught:
        requant_int8(broken, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert caught.value.where == str(file)
    assert not (tmp_path / "out" / file.name).exists()
    assert not (tmp_path / "out" / MANIFEST).exists()


def test_a_matrix_that_is_replaced_must_be_the_sources_to_the_last_byte(
    model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    broken = clone(model, tmp_path / "model")
    flip(broken, REPLACED, 200_000)
    with pytest.raises(InputError, match=r"k_proj\.weight differs between the model and the source"):
        requant_int8(broken, tmp_path / "out", source=tiny_source, recipe=recipe())


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", INDEX])
def test_a_damaged_small_file_of_the_model_is_refused_before_the_first_byte(
    model: Path, tiny_source: Path, tmp_path: Path, name: str
) -> None:
    broken = clone(model, tmp_path / "model")
    with (broken / name).open("ab") as f:
        f.write(b" ")
    with pytest.raises(InputError, match="is damaged: sha256 is") as caught:
        requant_int8(broken, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert caught.value.where == str(broken / name)
    assert not (tmp_path / "out").exists()


def test_a_model_without_a_manifest_has_nothing_to_compare(
    model: Path, tiny_source: Path, tmp_path: Path
) -> None:
    bare = clone(model, tmp_path / "model")
    (bare / MANIFEST).unlink()
    flip(bare, BESIDE, 6)
    requant_int8(bare, tmp_path / "out", source=tiny_source, recipe=recipe())
    assert (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.parametrize("manifest", [True, False])
def test_a_source_that_differs_anywhere_in_a_matrix_is_refused(
    model: Path, tiny_source: Path, tmp_path: Path, manifest: bool
) -> None:
    own, other = clone(model, tmp_path / "model"), clone(tiny_source, tmp_path / "source")
    if not manifest:
        (own / MANIFEST).unlink()
    flip(other, "lm_head.weight", 2**17)
    with pytest.raises(InputError, match=r"lm_head\.weight differs between the model and the source"):
        requant_int8(own, tmp_path / "out", source=other, recipe=recipe())
