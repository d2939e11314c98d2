"""requant-int8: the limit on a matrix's error."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from q38.checkpoint.index import INDEX, Checkpoint
from q38.quantize.driver import quantize
from q38.quantize.requant_int8 import requant_int8
from q38.recipe.bits import check_resolution, plan_bits
from tests.quantize.requant.common import ATTENTION, digests, recipe, rewrite


def spiky(weight: torch.Tensor) -> torch.Tensor:
    """One large weight per group, the others half a step: the worst case of a shared scale."""
    result = torch.full_like(weight, 0.0039)
    result[:, ::128] = 1.0
    return result


@pytest.fixture(scope="module")
def spiky_pair(tiny_source: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Source and model whose k_proj INT8 cannot hold."""
    root = tmp_path_factory.mktemp("spiky")
    shutil.copytree(tiny_source, root / "source")
    rewrite(root / "source", f"{ATTENTION}.k_proj.weight", spiky)
    quantize(root / "source", root / "model", recipe())
    return root / "source", root / "model"


def test_a_matrix_that_fails_the_gate_stays_in_16_bit_with_its_fused_partners(
    spiky_pair: tuple[Path, Path], tmp_path: Path
) -> None:
    source, model = spiky_pair
    found = requant_int8(model, tmp_path / "out", source=source, recipe=recipe())
    out, before = Checkpoint.open(tmp_path / "out"), Checkpoint.open(model)
    kept = [f"{ATTENTION}.{p}_proj" for p in "kqv"]
    assert found["kept"] == kept
    for name in kept:
        assert out.read_bytes(f"{name}.weight") == before.read_bytes(f"{name}.weight")
        assert f"{name}.qweight" not in out.tensors
    assert f"{ATTENTION}.o_proj.qweight" in out.tensors
    bits = plan_bits(out.config, recipe()) | dict.fromkeys(kept, 16)
    check_resolution(out.config["quantization_config"], bits)
    reasons = {row["module"]: row["kept"] for row in found["matrices"]}
    assert reasons[f"{ATTENTION}.k_proj"].startswith("relative error 0.04")
    assert reasons[f"{ATTENTION}.q_proj"] == f"one matrix with {ATTENTION}.k_proj in the server"
    assert reasons["lm_head"] is None


def test_the_gate_can_be_opened(spiky_pair: tuple[Path, Path], tmp_path: Path) -> None:
    source, model = spiky_pair
    found = requant_int8(model, tmp_path / "out", source=source, recipe=recipe(max_relative_error=0.06))
    assert found["kept"] == []


def test_a_gate_that_nothing_passes_changes_no_shard(model: Path, tiny_source: Path, tmp_path: Path) -> None:
    found = requant_int8(model, tmp_path / "out", source=tiny_source, recipe=recipe(max_relative_error=0.001))
    assert len(found["kept"]) == 8
    before, after = digests(model), digests(tmp_path / "out")
    assert {name for name in before if before[name] != after[name]} <= {"config.json", INDEX}
