"""Tokens per expert where AutoRound tunes, and what becomes of the experts that got too few."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open

from q38.checkpoint.index import Checkpoint
from q38.model.names import LAYERS
from q38.quantize.driver import quantize
from q38.quantize.local import grid
from q38.recipe.schema import Recipe

EXPERTS = f"{LAYERS}.0.mlp.experts"
SHARD = "model-00002-of-00005.safetensors"


def test_every_route_of_every_token_is_counted_once(tiny_quantized: Path) -> None:
    lists = json.loads((tiny_quantized / "coverage.json").read_text())
    manifest = json.loads((tiny_quantized / "MANIFEST.json").read_text())
    assert set(lists) == {"0", "1", "2", "3"} and "coverage.json" in manifest["files"]
    for block in manifest["result"]["blocks"]:
        tokens = lists[str(block["block"])]["tokens"]
        assert sum(tokens) == 8 * 64 * 4  # each token has four experts
        assert (block["coverage"]["min"], block["coverage"]["max"]) == (min(tokens), max(tokens))
        assert block["fallback"] == [e for e, n in enumerate(tokens) if n < 2]


def test_experts_with_few_tokens_get_searched_scales_and_the_others_what_autoround_made(
    tiny_source: Path, tiny_ple: Path, tiny_quantized: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    tokens = json.loads((tiny_quantized / "coverage.json").read_text())["0"]["tokens"]
    least = sorted(tokens)[3]
    result = quantize(
        tiny_source, tmp_path / "out", vary(experts={"min_tokens": least}), ple=tiny_ple, blocks="0"
    )
    few = [e for e, n in enumerate(tokens) if n < least]
    assert 1 <= len(few) <= 3
    assert result["blocks"][0]["fallback"] == few
    source = Checkpoint.open(tiny_source)
    with (
        safe_open(str(tmp_path / "out" / SHARD), "pt") as ours,
        safe_open(str(tiny_quantized / SHARD), "pt") as theirs,
    ):
        for e in range(len(tokens)):
            for field in ("qweight", "scales"):
                name = f"{EXPERTS}.{e}.down_proj.{field}"
                same = torch.equal(ours.get_tensor(name), theirs.get_tensor(name))
                assert same == (e not in few), (e, field)
        weight = source.read(f"{EXPERTS}.down_proj")[few[0]].float()
        scale = grid.search(weight, torch.ones(weight.shape[1]), 2, 128)
        wanted = grid.packed(grid.nearest(weight, scale, 2), scale, 2)
        assert torch.equal(ours.get_tensor(f"{EXPERTS}.{few[0]}.down_proj.qweight"), wanted.qweight)
        assert torch.equal(ours.get_tensor(f"{EXPERTS}.{few[0]}.down_proj.scales"), wanted.scales)
