"""q38's own resolution of AutoRound's extra_config against SGLang's class, on random entries."""

from __future__ import annotations

import json
import random
from typing import TYPE_CHECKING, Any

import pytest

from q38.recipe.resolve import Scheme, resolve_sglang

if TYPE_CHECKING:
    from tests.sglang_ext.conftest import Child

NAMES = [
    f"model.layers.{layer}.{module}"
    for layer in (0, 1, 10)
    for module in ("attn.q_proj", "attn.k_proj", "mlp.gate", "mlp.up_proj")
]
PATTERNS = [
    ".*q_proj",
    r"model\.layers\.1\..*",
    r".*\.layers\.\d+\.mlp\..*",
    "^model.*k_proj$",
    "attn.q_pro.*",
    "(",
]


def random_config(rng: random.Random) -> dict[str, Any]:
    keys = rng.sample(NAMES + PATTERNS, rng.randrange(5))
    values = [
        {"bits": rng.choice([2, 4, 8, 16])},
        {"group_size": 64},
        {"sym": False},
        {"bits": 8, "group_size": -1},
    ]
    extra = {key: rng.choice(values) for key in keys}
    base = {"bits": 2, "group_size": 128, "sym": True, "block_name_to_quantize": "model.layers"}
    return {**base, "extra_config": extra}


def test_sglang_resolves_every_name_as_q38_does(sglang_child: Child) -> None:
    rng = random.Random(0)
    configs = [random_config(rng) for _ in range(200)]
    code = f"""
import json
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
configs, names = json.loads({json.dumps(json.dumps(configs))}), {[*NAMES, "lm_head"]!r}
result = [[AutoRoundConfig.from_config(dict(c)).get_layer_config(object(), n) for n in names] for c in configs]
"""
    for config, found in zip(configs, sglang_child.run(code), strict=True):
        for name, (bits, group_size, sym) in zip([*NAMES, "lm_head"], found, strict=True):
            assert resolve_sglang(name, config) == Scheme(bits, group_size, sym), (name, config)


def test_experts_of_unequal_width_are_refused_by_both(sglang_child: Child) -> None:
    layer = "model.layers.0.mlp.experts"
    extra = {f"{layer}.{e}.up_proj": {"bits": bits} for e, bits in ((0, 2), (1, 4))}
    config = {
        "bits": 2,
        "group_size": 128,
        "sym": True,
        "block_name_to_quantize": "model.layers",
        "extra_config": extra,
    }
    code = f"""
from sglang.srt.layers.quantization.auto_round import AutoRoundConfig
class FusedMoE: pass
AutoRoundConfig.from_config({config!r}).get_layer_config(FusedMoE(), {layer!r})
"""
    with pytest.raises(RuntimeError, match="consistent"):
        sglang_child.run(code)
    with pytest.raises(ValueError, match=layer):
        resolve_sglang(layer, config, kind="experts")
