from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.job import read_manifest
from q38.checkpoint.packing import dequantize, pack
from q38.measure import matrices, numbers
from q38.measure.checks import Check, Fault
from q38.measure.files import check_shards
from q38.measure.matrices import MAX_RELATIVE_ERROR, count_codes
from q38.measure.numbers import check_numbers
from q38.quantize.rtn import round_to_nearest
from tests.measure.packed import edit_tensor

LAYER = "model.language_model.layers.0"
EXPERT = f"{LAYER}.mlp.experts.3.up_proj"
DENSE = f"{LAYER}.linear_attn.in_proj_qkv"
Broken = Callable[..., Path]


def failures(model: Path, source: Path | None = None) -> dict[str, list[Fault]]:
    part = check_numbers(Checkpoint.open(model), Checkpoint.open(source) if source else None)
    return {c.name: c.faults for c in part.checks if c.passed is False}


def test_a_packed_model_passes(packed: Path, tiny_source: Path) -> None:
    part = check_numbers(Checkpoint.open(packed), Checkpoint.open(tiny_source))
    assert [c.name for c in part.checks if c.passed is not True] == []
    experts = next(g for g in part.data["groups"] if g["name"] == "experts")
    assert experts["levels_used"] == 4
    assert sum(experts["histogram"]) == experts["weights"]
    assert 0.3 < experts["relative_error"] <= experts["worst_relative_error"] < MAX_RELATIVE_ERROR[2]


def test_the_autoround_model_passes(tiny_quantized: Path, tiny_source: Path) -> None:
    assert failures(tiny_quantized, tiny_source) == {}


def test_the_error_against_the_fp8_release_is_that_of_its_own_rounding(
    packed: Path, tiny_source: Path, tiny_source_fp8: Path
) -> None:
    def errors(source: Path) -> dict[str, float]:
        part = check_numbers(Checkpoint.open(packed), Checkpoint.open(source))
        assert [c.name for c in part.checks if c.passed is not True] == []
        return {g["name"]: g["relative_error"] for g in part.data["groups"]}

    bf16, fp8 = errors(tiny_source), errors(tiny_source_fp8)
    assert bf16["experts"] != fp8["experts"]
    assert fp8["experts"] == pytest.approx(bf16["experts"], rel=0.01)  # fp8 adds 2.6 % of noise in quadrature
    assert fp8["gdn_in"] == bf16["gdn_in"]


def test_without_a_source_the_model_is_checked_for_itself(packed: Path) -> None:
    checks = {c.name: c for c in check_numbers(Checkpoint.open(packed)).checks}
    assert checks["finite scales"].passed and checks["all levels used"].passed
    assert checks["error against the source"].passed is None
    assert checks["error against the source"].note == "needs --source"


@pytest.mark.parametrize("value", [float("inf"), float("nan"), float("-inf")])
@pytest.mark.parametrize("module", [EXPERT, DENSE])
def test_a_scale_that_is_not_finite_is_named(
    broken: Broken, tiny_source: Path, module: str, value: float
) -> None:
    def spoil(scales: torch.Tensor) -> torch.Tensor:
        scales[0, 5] = value
        return scales

    model = broken()
    shard = edit_tensor(model, f"{module}.scales", spoil)
    assert failures(model, tiny_source)["finite scales"] == [
        Fault(
            shard,
            f"{module}.scales",
            f"1 of {Checkpoint.open(model).info(f'{module}.scales').numel} scales are not finite",
        )
    ]


def test_a_wrecked_scale_shows_in_the_error_of_its_matrix(broken: Broken, tiny_source: Path) -> None:
    def flip_exponent(scales: torch.Tensor) -> torch.Tensor:
        bits = scales.view(torch.int16)
        bits[0, 5] ^= 1 << 14
        return scales

    model = broken()
    edit_tensor(model, f"{EXPERT}.scales", flip_exponent)
    assert [f.tensor for f in failures(model, tiny_source)["error against the source"]] == [EXPERT]


def test_a_flipped_bit_in_an_unpacked_tensor_is_found(broken: Broken, tiny_source: Path) -> None:
    def flip(weight: torch.Tensor) -> torch.Tensor:
        weight.view(torch.int16)[7, 11] ^= 1
        return weight

    model, name = broken(), f"{LAYER}.mlp.gate.weight"
    shard = edit_tensor(model, name, flip)
    found = failures(model, tiny_source)
    assert found == {"copied tensors": [Fault(shard, name, "is not packed and differs from the source")]}


def test_one_flipped_code_is_found_by_the_shard_hash(broken: Broken, tiny_source: Path) -> None:
    """A code more or less is inside the error of two bits: only the manifest can tell."""
    model = broken(manifest=True)

    def flip(words: torch.Tensor) -> torch.Tensor:
        words[3, 3] ^= 1
        return words

    shard = edit_tensor(model, f"{EXPERT}.qweight", flip)
    assert failures(model, tiny_source) == {}
    manifest = read_manifest(model)
    assert manifest is not None
    assert [f.file for f in check_shards(model, manifest).faults] == [shard]


def test_shard_hashes_of_a_whole_model_agree(packed: Path) -> None:
    manifest = read_manifest(packed)
    assert manifest is not None
    check = check_shards(packed, manifest)
    assert (check.passed, check.checked) == (True, 3)


def test_swapped_experts_are_both_named(broken: Broken, tiny_source: Path) -> None:
    model = broken()
    other = EXPERT.replace("experts.3", "experts.9")
    checkpoint = Checkpoint.open(model)
    for part in ("qweight", "scales"):
        a, b = (checkpoint.read(f"{m}.{part}") for m in (EXPERT, other))
        edit_tensor(model, f"{EXPERT}.{part}", lambda _, b=b: b)
        edit_tensor(model, f"{other}.{part}", lambda _, a=a: a)
    assert {f.tensor for f in failures(model, tiny_source)["error against the source"]} == {EXPERT, other}


def test_gate_in_the_place_of_up_is_found(broken: Broken, tiny_source: Path) -> None:
    model = broken()
    gate = EXPERT.replace("up_proj", "gate_proj")
    for part in ("qweight", "scales"):
        value = Checkpoint.open(model).read(f"{gate}.{part}")
        edit_tensor(model, f"{EXPERT}.{part}", lambda _, value=value: value)
    assert [f.tensor for f in failures(model, tiny_source)["error against the source"]] == [EXPERT]


def test_scales_with_the_wrong_sign_are_found(broken: Broken, tiny_source: Path) -> None:
    model = broken()
    edit_tensor(model, f"{DENSE}.scales", lambda t: -t)
    assert [f.tensor for f in failures(model, tiny_source)["error against the source"]] == [DENSE]


def test_a_level_that_is_never_used_is_found(broken: Broken) -> None:
    model = broken()
    # Every code 3 becomes 1: the high bit of each pair is cleared where the low bit is set.
    edit_tensor(model, f"{EXPERT}.qweight", lambda w: w & ~((w & 0x55555555) << 1))
    (fault,) = failures(model)["all levels used"]
    assert fault.tensor == f"{EXPERT}.qweight"
    assert fault.what == "codes [3] of 4 never occur"


def test_wide_codes_that_use_few_levels_are_found_by_group(broken: Broken) -> None:
    model = broken()
    names = [n for n in Checkpoint.open(model).tensors if ".shared_expert." in n and n.endswith(".qweight")]
    for name in names:
        edit_tensor(model, name, lambda w: w & 0x0F0F0F0F)
    assert [f.tensor for f in failures(model)["all levels used"]] == ["shared_expert"]


def test_a_value_that_is_not_finite_in_a_norm_is_named(broken: Broken) -> None:
    def spoil(weight: torch.Tensor) -> torch.Tensor:
        weight[0] = float("nan")
        return weight

    model, name = broken(), f"{LAYER}.attn_hyper_connection.hc_norm.weight"
    edit_tensor(model, name, spoil)
    assert [f.tensor for f in failures(model)["finite values"]] == [name]


def test_a_matrix_that_the_source_lacks_is_named(broken: Broken, tiny_source: Path, tmp_path: Path) -> None:
    from tests.measure.packed import copy_model

    source = copy_model(tiny_source, tmp_path / "source", manifest=False)
    edit_tensor(source, "lm_head.weight", lambda _: None)
    faults = failures(broken(), source)["error against the source"]
    assert [f.tensor for f in faults] == ["lm_head"]
    assert faults[0].what.startswith("the source has no matrix")


def _weights(kind: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    gauss = torch.randn(128, 512, generator=generator)
    if kind == "gaussian":
        return gauss
    return gauss.sign() * -torch.rand(128, 512, generator=generator).clamp(min=1e-6).log()  # Laplace


@settings(max_examples=12)
@given(st.sampled_from([2, 3, 4, 8]), st.sampled_from(["gaussian", "laplace"]), st.integers(0, 99))
def test_the_limits_part_right_weights_from_wrong_ones(bits: int, kind: str, seed: int) -> None:
    right, wrong = _weights(kind, seed), _weights(kind, seed + 1000)
    found = dequantize(*round_to_nearest(right, bits, 128), bits)
    error = float((found - right).norm() / right.norm())
    assert error < MAX_RELATIVE_ERROR[bits] * (0.5 if kind == "gaussian" else 0.7)
    assert float((found - wrong).norm() / wrong.norm()) > 1.2


@given(st.sampled_from([2, 3, 4, 8]), st.integers(0, 10**6))
def test_counting_packed_codes_equals_counting_unpacked_ones(bits: int, seed: int) -> None:
    codes = torch.randint(
        0, 1 << bits, (64, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    counted = count_codes(pack(codes, bits), bits, 64)
    assert torch.equal(counted, torch.bincount(codes.flatten(), minlength=1 << bits))


def test_every_matrix_has_a_row_and_the_experts_of_a_layer_one_together(
    packed: Path, tiny_source: Path
) -> None:
    rows = check_numbers(Checkpoint.open(packed), Checkpoint.open(tiny_source)).data["matrices"]
    found = {row["name"]: row for row in rows}
    assert found[DENSE]["matrices"] == 1 and found[DENSE]["worst_matrix"] == DENSE
    experts = found[f"{LAYER}.mlp.experts.*.up_proj"]
    assert experts["matrices"] == 16 and experts["worst_matrix"].startswith(f"{LAYER}.mlp.experts.")
    assert sum(row["matrices"] for row in rows) == 218


def test_the_size_of_the_pieces_does_not_change_the_result(
    packed: Path, tiny_source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def groups() -> list[dict[str, Any]]:
        return check_numbers(Checkpoint.open(packed), Checkpoint.open(tiny_source)).data["groups"]

    whole = groups()
    for module in (matrices, numbers):
        monkeypatch.setattr(module, "PIECE", 10_000)
    for before, after in zip(whole, groups(), strict=True):
        assert before["histogram"] == after["histogram"]
        assert after["relative_error"] == pytest.approx(before["relative_error"], rel=1e-9)


def test_reports_show_a_limited_number_of_faults_and_their_count() -> None:
    faults = [Fault("f", str(i), "x") for i in range(250)]
    row: dict[str, Any] = Check.of_faults("name", faults, checked=300).to_dict()
    assert (row["fault_count"], len(row["faults"]), row["passed"]) == (250, 100, False)
