"""Bytes that each step of a run will write, told from config.json and the recipe."""

from __future__ import annotations

from q38.checkpoint.index import read_json
from q38.pipeline.setup import Setup
from q38.recipe.bits import plan_bits
from q38.recipe.budget import sizes


def expected_bytes(setup: Setup) -> dict[str, int]:
    """Step name -> bytes; empty while there is no source yet (a synthetic model that is still to be made)."""
    config = (setup.source or setup.work.synth) / "config.json"
    if not config.exists():
        return {}
    values = read_json(config)
    disk = sizes(values, setup.recipe, plan_bits(values, setup.recipe)).disk
    return {step: disk[step] for step in ("split-ple", "quantize", "requant-int8")}
