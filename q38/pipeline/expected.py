"""Bytes that each step of a run will write, told from config.json and the recipe."""

from __future__ import annotations

from q38.checkpoint.index import read_json
from q38.pipeline.setup import Setup
from q38.recipe.bits import plan_bits
from q38.recipe.budget import sizes
from q38.recipe.schema import RequantInt8


def expected_bytes(setup: Setup) -> dict[str, int]:
    """Step name -> bytes; empty while there is no source yet (a synthetic model that is still to be made)."""
    config = (setup.source or setup.work.synth) / "config.json"
    if not config.exists():
        return {}
    values, recipe = read_json(config), setup.recipe
    tuned = recipe.model_copy(update={"requant_int8": RequantInt8(groups=[])})  # what quantize itself packs
    disk = sizes(values, recipe, plan_bits(values, recipe)).disk
    return {
        "split-ple": disk["split-ple"],
        "quantize": sizes(values, tuned, plan_bits(values, tuned)).disk["quantize"],
        "requant-int8": disk["requant-int8"],
    }
