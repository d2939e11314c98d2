"""What the tests of this folder share: the fast recipe, and one run whose fake-quantized weights were recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.quantize.driver import quantize
from q38.quantize.plan import Plan, make_plan
from q38.recipe.schema import Recipe, load_recipe, parse_recipe

FAST = Path(__file__).parents[1] / "data" / "fast.yaml"


@pytest.fixture(scope="session")
def fast() -> Recipe:
    return load_recipe(FAST)


@pytest.fixture(scope="session")
def vary(fast: Recipe) -> Callable[..., Recipe]:
    """The fast recipe with other values in its quantize section; a nested section is merged."""

    def build(**quantize: Any) -> Recipe:
        value = fast.to_dict()
        del value["requant_int8"]["groups"]  # the default, less what quantize.bits lowers
        for key, new in quantize.items():
            old = value["quantize"].get(key)
            value["quantize"][key] = (
                {**old, **new} if isinstance(old, dict) and isinstance(new, dict) else new
            )
        return parse_recipe(value)

    return build


@pytest.fixture(scope="session")
def plan(tiny_source: Path, fast: Recipe) -> Plan:
    return make_plan(Checkpoint.open(tiny_source), fast)


@dataclass
class Recorded:
    """A run, and the weight of every matrix as AutoRound had fake-quantized it just before packing."""

    out: Path
    weights: dict[str, torch.Tensor] = field(default_factory=dict)


@pytest.fixture(scope="session")
def recorded(
    tiny_source: Path, tiny_ple: Path, fast: Recipe, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    """The same run as `tiny_quantized`, watched."""
    from auto_round.compressors import utils
    from auto_round.context.model import ModelContext

    run = Recorded(tmp_path_factory.mktemp("recorded") / "model")
    original = utils.immediate_pack

    def watched(name: str, layer_config: dict[str, Any]) -> None:
        module = ModelContext.get_context().model.get_submodule(name)
        run.weights[name] = module.weight.detach().clone()
        original(name, layer_config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(utils, "immediate_pack", watched)
        quantize(tiny_source, run.out, fast, ple=tiny_ple)
    return run
