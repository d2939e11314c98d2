"""q38 quantize on a GPU, in a process of its own as the command runs: nothing has started CUDA before it there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix, dequantize
from q38.model.names import LAYERS
from q38.quantize.driver import quantize
from q38.recipe.schema import load_recipe, parse_recipe
from tests.quantize.conftest import FAST

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]

QUANTIZE = """
import json, sys
from pathlib import Path
from q38.quantize.driver import quantize
from q38.recipe.schema import parse_recipe
source, ple, out, recipe = sys.argv[1:]
quantize(Path(source), Path(out), parse_recipe(json.loads(recipe)), ple=Path(ple), device="0")
"""
EXPERT = f"{LAYERS}.0.mlp.experts.3.up_proj"


@pytest.mark.parametrize("method", ["autoround", "expert-local", "expert-local-gsq"])
def test_the_files_are_those_of_the_cpu_and_the_levels_as_close_to_the_source(
    method: str, tiny_source: Path, tiny_ple: Path, tmp_path: Path
) -> None:
    if method == "autoround":
        pytest.importorskip("auto_round")
    values = load_recipe(FAST).to_dict()
    values["quantize"]["experts"] |= {"method": method, "iters": 4, "rows": 32}
    arguments = [str(tiny_source), str(tiny_ple), str(tmp_path / "gpu"), json.dumps(values)]
    run = subprocess.run([sys.executable, "-c", QUANTIZE, *arguments], capture_output=True, timeout=300)
    assert run.returncode == 0, run.stderr.decode()[-4000:]
    quantize(tiny_source, tmp_path / "cpu", parse_recipe(values), ple=tiny_ple, device="cpu")

    ours, theirs = (Checkpoint.open(tmp_path / name) for name in ("gpu", "cpu"))
    assert layout(ours) == layout(theirs)
    assert ours.config == theirs.config
    result = json.loads((tmp_path / "gpu" / "MANIFEST.json").read_text())["result"]
    assert result["complete"]
    assert all(block["device_peak"] > 0 for block in result["blocks"])

    weight = Checkpoint.open(tiny_source).read(f"{LAYERS}.0.mlp.experts.gate_up_proj")[3]
    up = weight[len(weight) // 2 :].float()
    errors = [float((dequantize(*packed(c), 2) - up).norm() / up.norm()) for c in (ours, theirs)]
    assert errors[0] == pytest.approx(errors[1], rel=0.1)


def layout(checkpoint: Checkpoint) -> dict[str, Any]:
    """Name -> file, dtype and shape of every tensor."""
    return {name: (t.file.name, t.dtype, t.shape) for name, t in checkpoint.tensors.items()}


def packed(checkpoint: Checkpoint) -> PackedMatrix:
    return PackedMatrix(*(checkpoint.read(f"{EXPERT}.{field}") for field in PackedMatrix._fields))
