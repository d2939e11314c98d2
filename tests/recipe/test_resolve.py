"""The three readers of a quantization config, against AutoRound's own code and SGLang's rules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.recipe.resolve import HIGH, Scheme, resolve_autoround, resolve_loader, resolve_sglang

NAMES = [
    f"model.layers.{i}.{part}"
    for i in (0, 1, 10)
    for part in ("attn.q_proj", "attn.k_proj", "mlp.gate", "mlp.gate_up", "mlp.experts.0.up_proj")
]
PATTERNS = [
    "attn.q_proj", ".*attn.(q_proj|k_proj)$", "layers.1", "^model.layers.1.", "mlp.gate", "mlp.gate$", ".*experts.*",
    r".*attn\.q_proj$", "layers.[01].mlp", "model.layers.0.attn.q_proj", "model.layers.10.mlp.gate", "absent",
]  # fmt: skip
widths = st.sampled_from([2, 3, 4, 8, HIGH])
BASE = Scheme(2, 128)


def entries(keys: list[str]) -> st.SearchStrategy[dict[str, dict[str, Any]]]:
    entry = st.fixed_dictionaries({"bits": widths, "group_size": st.sampled_from([64, 128])})
    return st.lists(st.tuples(st.sampled_from(keys), entry), max_size=6, unique_by=lambda kv: kv[0]).map(dict)


@pytest.fixture(scope="module")
def model() -> Any:
    """A module tree with a Linear at each of NAMES."""
    from torch import nn

    root = nn.Module()
    for name in NAMES:
        *path, leaf = name.split(".")
        parent = root
        for piece in path:
            if not hasattr(parent, piece):
                parent.add_module(piece, nn.Module())
            parent = getattr(parent, piece)
        parent.add_module(leaf, nn.Linear(128, 32, bias=False))
    root.add_module("lm_head", nn.Linear(128, 32, bias=False))
    root.config = SimpleNamespace(model_type="none", architectures=[], quantization_config=None)
    return root


@settings(max_examples=60)
@given(layer_config=entries(NAMES + PATTERNS))
def test_tuning_agrees_with_autorounds_own_resolver(model: Any, layer_config: dict[str, Any]) -> None:
    from auto_round.compressors.config_resolution import ResolvedScheme
    from auto_round.compressors.layer_config_resolver import resolve_layer_config
    from auto_round.schemes import QuantizationScheme

    scheme = ResolvedScheme.from_scheme(QuantizationScheme(bits=2, group_size=128, sym=True, act_bits=HIGH))
    resolved = resolve_layer_config(
        model=model,
        scheme=scheme,
        layer_config={k: dict(v) for k, v in layer_config.items()},
        quant_block_list=[["model.layers.0", "model.layers.1", "model.layers.10"]],
    )
    for name in NAMES:
        found = resolved[name]
        assert resolve_autoround(name, layer_config, BASE, NAMES) == Scheme(
            found["bits"], found["group_size"]
        )


@settings(max_examples=60)
@given(
    extra=entries(
        [*NAMES, "model.layers.1.mlp", "attn.q_proj", ".*k_proj", r".*\.mlp\.gate", "lm_head", "absent"]
    )
)
def test_loading_agrees_with_autorounds_own_loader(model: Any, extra: dict[str, Any]) -> None:
    from auto_round.inference.convert_model import get_layer_config

    config = {
        "bits": 2,
        "group_size": 128,
        "sym": True,
        "block_name_to_quantize": "model.layers",
        "extra_config": extra,
    }
    own = SimpleNamespace(
        **{**config, "data_type": "int", "extra_config": {k: dict(v) for k, v in extra.items()}}
    )
    loaded = get_layer_config(model, own)
    for name in NAMES:
        found = loaded[name]
        assert resolve_loader(name, config, set(NAMES)) == Scheme(
            found["bits"], found["group_size"], found["sym"]
        )


def sglang_config(extra: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {
        "bits": 2,
        "group_size": 128,
        "sym": True,
        "block_name_to_quantize": "model.layers",
        "extra_config": extra,
    }


def test_a_backslash_in_a_tuning_pattern_matches_nothing() -> None:
    eight = {"bits": 8}
    assert resolve_autoround(NAMES[0], {r".*attn\.q_proj$": eight}, BASE, NAMES).bits == 2
    assert resolve_autoround(NAMES[0], {".*attn.q_proj$": eight}, BASE, NAMES).bits == 8


def test_tuning_takes_the_last_pattern_and_sglang_the_first() -> None:
    rules = {".*attn.*": {"bits": 8}, ".*q_proj": {"bits": 4}}
    assert resolve_autoround(NAMES[0], rules, BASE, NAMES).bits == 4
    assert resolve_sglang(NAMES[0], sglang_config(rules)).bits == 8


def test_sglang_prefers_the_exact_name_to_an_earlier_pattern() -> None:
    assert resolve_sglang(NAMES[0], sglang_config({".*": {"bits": 8}, NAMES[0]: {"bits": 4}})).bits == 4


def test_sglang_matches_patterns_whole() -> None:
    assert resolve_sglang(NAMES[0], sglang_config({"attn.q_pro.*": {"bits": 8}})).bits == 2


def test_sglang_skips_a_broken_pattern() -> None:
    assert resolve_sglang(NAMES[0], sglang_config({"(": {"bits": 8}})).bits == 2


def test_outside_the_blocks_sglang_defaults_to_16_bit_and_group_size_minus_one() -> None:
    assert resolve_sglang("lm_head", sglang_config({}), kind="lm_head") == Scheme(HIGH, -1)
    assert resolve_sglang("lm_head", sglang_config({"^lm_head.*": {"bits": 8}}), kind="lm_head") == Scheme(
        8, -1
    )


def test_a_fused_module_is_found_through_its_members_only_with_the_mapping() -> None:
    config = sglang_config(
        {"model.layers.0.attn.q_proj": {"bits": 8}, "model.layers.0.attn.k_proj": {"bits": 8}}
    )
    packed = {"qk_proj": ("q_proj", "k_proj")}
    assert resolve_sglang("model.layers.0.attn.qk_proj", config, packed=packed).bits == 8
    assert resolve_sglang("model.layers.0.attn.qk_proj", config).bits == 2


def test_members_of_a_fused_module_must_agree() -> None:
    config = sglang_config({"model.layers.0.attn.q_proj": {"bits": 8}})
    with pytest.raises(ValueError, match="requires one scheme"):
        resolve_sglang("model.layers.0.attn.qk_proj", config, packed={"qk_proj": ("q_proj", "k_proj")})


def test_experts_of_a_layer_must_agree() -> None:
    config = sglang_config({f"model.layers.0.mlp.experts.{e}.up_proj": {"bits": 4 - e} for e in (0, 1)})
    with pytest.raises(ValueError, match="requires one scheme"):
        resolve_sglang("model.layers.0.mlp.experts", config, kind="experts")
