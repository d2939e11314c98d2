"""q38 release diff: what differs, by how much, and what may."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import dequantize, unpack
from q38.checkpoint.writer import write_safetensors
from q38.measure.matrices import find_matrices
from q38.quantize.driver import quantize
from q38.recipe.schema import load_recipe
from q38.release import tensors as module
from q38.release.build import build
from q38.release.collect import from_model
from q38.release.diff import diff
from q38.release.tensors import Side, compare_matrix, compare_tensor
from q38.release.varying import VARYING, same_but_for_fields, without
from tests.measure.packed import edit_json, edit_tensor
from tests.quantize.conftest import FAST
from tests.release.test_check import flip

EXPERT = "model.language_model.layers.1.mlp.experts.3.up_proj"


def files(result: dict[str, Any]) -> dict[str, str]:
    return {row["file"]: row["state"] for row in result["files"]}


def test_a_release_and_its_copy_are_identical(sealed: Path, release: Path) -> None:
    result = diff(sealed, release)
    assert (result["identical"], result["same"]) == (True, True)
    assert (result["files"], result["tensors"], result["groups"]) == ([], [], [])


def test_two_releases_of_one_model_differ_in_declared_fields_alone(
    sealed: Path, packed: Path, tmp_path: Path
) -> None:
    build(from_model(packed), tmp_path / "again")  # links where the other has copies
    result = diff(sealed, tmp_path / "again")
    assert result["same"]
    assert set(files(result)) <= {"RELEASE.json"}


def test_one_flipped_code_is_counted_and_measured(sealed: Path, release: Path) -> None:
    def flip_code(words: torch.Tensor) -> torch.Tensor:
        words = words.clone()
        words[0, 5] ^= 1  # the low bit of code 0 of output 5
        return words

    shard = edit_tensor(release, f"{EXPERT}.qweight", flip_code)
    result = diff(sealed, release)
    assert not result["same"]
    assert files(result) == {shard: "changed"}
    (row,) = result["tensors"]
    one, other = (_weights(root, EXPERT) for root in (sealed, release))
    assert (row["tensor"], row["changed"], row["of"], row["unit"]) == (EXPERT, 1, one.numel(), "codes")
    assert row["max_abs"] == pytest.approx(float((one - other).abs().max()))
    assert row["relative_error"] == pytest.approx(float((one - other).norm() / one.norm()), rel=1e-4)
    (group,) = result["groups"]
    assert (group["group"], group["tensors"]) == ("experts", 1)


def _weights(root: Path, name: str) -> torch.Tensor:
    checkpoint = Checkpoint.open(root)
    matrix = next(m for m in find_matrices(checkpoint) if m.module == name)
    return dequantize(*(checkpoint.read(part) for part in matrix.tensors), matrix.bits)


def test_a_changed_scale_changes_weights_but_no_code(sealed: Path, release: Path) -> None:
    edit_tensor(release, f"{EXPERT}.scales", lambda scales: scales * 2)
    (row,) = diff(sealed, release)["tensors"]
    assert row["changed"] == 0
    assert row["relative_error"] == pytest.approx(1.0, rel=1e-3)


def test_a_plain_tensor_a_value_that_is_not_finite_and_a_missing_tensor(sealed: Path, release: Path) -> None:
    plain = [n for n, t in Checkpoint.open(sealed).tensors.items() if t.dtype == "BF16"]
    norm = next(n for n in plain if n.endswith("norm.weight"))
    router = next(n for n in plain if n.endswith("mlp.gate.weight"))

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[0] = math.nan
        return tensor

    edit_tensor(release, norm, spoil)
    edit_tensor(release, router, lambda tensor: None)
    rows = {row["tensor"]: row for row in diff(sealed, release)["tensors"]}
    assert rows[router]["state"] == "only in A"
    assert (rows[norm]["changed"], rows[norm]["max_abs"]) == (1, None)  # no JSON number for infinity
    assert set(rows) == {norm, router}


def test_a_changed_config_is_told_by_its_keys(sealed: Path, release: Path) -> None:
    edit_json(release / "config.json", lambda c: c["text_config"].update(rms_norm_eps=0.5))
    result = diff(sealed, release)
    (row,) = result["files"]
    assert (row["file"], row["declared"]) == ("config.json", False)
    assert row["keys"] == ["text_config.rms_norm_eps: 1e-06 -> 0.5"]
    assert result["tensors"] == []


def test_a_changed_table_is_measured_in_its_own_scale(sealed: Path, release: Path) -> None:
    flip(release / "ple" / "ple.f8_e4m3.bin", 300, 0)
    (row,) = diff(sealed, release)["tensors"]
    scale = json.loads((sealed / "ple" / "ple.json").read_text())["weight_scale"]
    code = (sealed / "ple" / "ple.f8_e4m3.bin").read_bytes()[300]
    pair = torch.tensor([code, code ^ 1], dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert row["max_abs"] == pytest.approx(float((pair[0] - pair[1]).abs()) * scale)
    assert row["changed"] == 1


def test_files_on_one_side_are_told(sealed: Path, release: Path) -> None:
    (release / "LICENSE").write_text("x")
    (release / "tokenizer.json").unlink()
    result = diff(sealed, release)
    assert files(result) == {"LICENSE": "only in B", "tokenizer.json": "only in A"}
    assert not result["same"]


def test_declared_fields_are_let_pass_and_others_beside_them_are_not(sealed: Path, release: Path) -> None:
    manifest = release / "MANIFEST.json"
    edit_json(manifest, lambda m: m.update(created="2031-01-01T00:00:00Z"))
    result = diff(sealed, release)
    assert (result["same"], result["identical"]) == (True, False)
    edit_json(manifest, lambda m: m["versions"].update(torch="9.9"))
    result = diff(sealed, release)
    assert not result["same"]
    assert "versions.torch" in result["files"][0]["keys"][0]


def test_two_tuned_builds_of_one_recipe_differ_in_declared_fields_alone(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, tmp_path: Path
) -> None:
    again = tmp_path / "again"
    quantize(tiny_source, again, load_recipe(FAST), ple=tiny_ple)
    assert {p.name for p in again.iterdir()} == {p.name for p in tiny_quantized.iterdir()}
    for file in sorted(again.iterdir()):
        pair = file.read_bytes(), (tiny_quantized / file.name).read_bytes()
        assert same_but_for_fields(file.name, *pair), file.name
    on_gpu = json.loads((again / "MANIFEST.json").read_text())
    before = json.dumps(on_gpu).encode()
    on_gpu["result"]["blocks"][0]["device_peak"] = 1
    assert same_but_for_fields("MANIFEST.json", before, json.dumps(on_gpu).encode())


def test_every_declared_field_is_one_that_some_file_has(sealed: Path) -> None:
    document = json.loads((sealed / "RELEASE.json").read_text())
    for field in VARYING["RELEASE.json"]:
        key = field.split(".")[0]
        assert key in document, f"{field} is declared and does not exist"


@pytest.mark.parametrize(
    ("value", "field", "left"),
    [
        ({"a": 1, "b": 2}, "a", {"b": 2}),
        ({"a": {"x": 1, "y": 2}}, "a.x", {"a": {"y": 2}}),
        ({"a": [{"x": 1, "y": 2}, {"x": 3}]}, "a.*.x", {"a": [{"y": 2}, {}]}),
        ({"a": {"p": {"x": 1}, "q": {"x": 2}}}, "a.*.x", {"a": {"p": {}, "q": {}}}),
        ({"a": 1}, "b.c", {"a": 1}),
        ([1, 2], "a", [1, 2]),
    ],
)
def test_fields_are_taken_out(value: Any, field: str, left: Any) -> None:
    assert without(value, (field,)) == left


def test_what_is_no_json_can_only_be_equal() -> None:
    assert not same_but_for_fields("MANIFEST.json", b"{", b"{}")
    assert not same_but_for_fields("chat_template.jinja", b"a", b"b")
    assert same_but_for_fields("records/steps/verify.json", b"a", b"b")


@settings(max_examples=25)
@given(
    bits=st.sampled_from([(2, 2), (2, 8), (8, 8), (4, 3)]),
    k=st.sampled_from([64, 128]),
    n=st.sampled_from([32, 96]),
    seed=st.integers(0, 2**31),
)
def test_matrices_are_compared_as_the_weights_they_stand_for(
    tmp_path_factory: pytest.TempPathFactory, bits: tuple[int, int], k: int, n: int, seed: int
) -> None:
    from q38.quantize.rtn import round_to_nearest

    generator = torch.Generator().manual_seed(seed)
    sides, weights, codes = [], [], []
    for i, width in enumerate(bits):
        packed = round_to_nearest(torch.randn(n, k, generator=generator), width, 32)
        root = tmp_path_factory.mktemp("side")
        write_safetensors(root / "model.safetensors", {f"m.{p}": t for p, t in packed._asdict().items()})
        (root / "config.json").write_text("{}")
        sides.append(Side(Checkpoint.open(root)))
        weights.append(dequantize(packed.qweight, packed.qzeros, packed.scales, width))
        codes.append(unpack(packed.qweight, width, k))
        assert torch.equal(sides[i].weights("m", 0, n), weights[i])
        assert torch.equal(sides[i].weights("m", n - 32, n), weights[i][-32:])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE", 32 * k)  # several pieces
        found = compare_matrix(sides[0], sides[1], "m")
    assert found is not None
    difference = weights[0] - weights[1]
    assert found.max_abs == pytest.approx(float(difference.abs().max()))
    assert found.relative_error == pytest.approx(float(difference.norm() / weights[0].norm()), rel=1e-4)
    if bits[0] == bits[1]:
        assert found.changed == int((codes[0] != codes[1]).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.float8_e4m3fn])
def test_plain_tensors_of_any_dtype_are_compared(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.arange(40).remainder(7).to(dtype)
    b = a.clone()
    b[3] = (a[3].float() + 1).to(dtype)
    for name, value in (("a", a), ("b", b)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        write_safetensors(tmp_path / name / "model.safetensors", {"t": value})
    one, other = (Checkpoint.open(tmp_path / name).info("t") for name in "ab")
    monkeypatch.setattr(module, "PIECE", 16)
    assert compare_tensor(one, one) is None
    found = compare_tensor(one, other)
    assert found is not None
    assert (found.changed, found.of, found.max_abs) == (1, 40, 1.0)


def test_a_packed_and_a_plain_matrix_are_compared(
    tiny_source: Path, sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = compare_matrix(Side(Checkpoint.open(tiny_source)), Side(Checkpoint.open(sealed)), EXPERT)
    assert found is not None
    assert (found.a, found.b) == ("16 bit 128 x 256", "2 bit 128 x 256")
    assert 0.2 < (found.relative_error or 0) < 1


def test_a_missing_directory_is_refused(sealed: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such directory"):
        diff(sealed, tmp_path / "absent")


def test_a_recipe_built_twice_gives_the_same_release(tiny_source: Path, tmp_path: Path) -> None:
    """The real steps but tuning, whose determinism tests/pipeline/test_run.py shows: split-ple, quantize, requant-int8."""
    from q38.ple.split import split_ple
    from q38.quantize.driver import quantize
    from q38.quantize.requant_int8 import requant_int8
    from q38.recipe.schema import load_recipe

    text = (Path(__file__).parents[1] / "data" / "fast.yaml").read_text()
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text.replace("experts: {iters: 2,", "experts: {method: rtn, iters: 2,"))
    built = []
    for name in ("one", "two"):
        root = tmp_path / name
        split_ple(tiny_source, root / "ple")
        quantize(tiny_source, root / "quantized", load_recipe(recipe), ple=root / "ple")
        requant_int8(root / "quantized", root / "model", source=tiny_source, recipe=load_recipe(recipe))
        build(from_model(root / "model", ple=root / "ple", recipe=recipe), root / "release")
        built.append(root / "release")
    result = diff(*built)
    assert result["same"], result["files"]
    assert {row["file"] for row in result["files"] if not row["file"].endswith(".json")} <= {"SHA256SUMS"}
    assert result["tensors"] == []
