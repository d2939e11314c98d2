"""The bit plan, and a config that AutoRound and SGLang read alike."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.data import data_path
from q38.model.names import LAYERS, Group, classify
from q38.recipe.bits import (
    FUSED,
    base_bits,
    check_resolution,
    extra_config,
    fused_modules,
    plan_bits,
    quantization_config,
)
from q38.recipe.resolve import HIGH, resolve_loader, resolve_sglang
from q38.recipe.schema import Recipe, parse_recipe

REAL = json.loads(data_path("assets", "models", "qwen3.8-flash-next.json").read_text())
# SGLang's mapping as its model class has it (Qwen3_5ForCausalLM.packed_modules_mapping).
PACKED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
}


def small_config(layers: int = 4, experts: int = 4) -> dict[str, Any]:
    config = copy.deepcopy(REAL)
    text = config["text_config"]
    text.update(num_hidden_layers=layers, num_experts=experts, num_experts_per_tok=2)
    text["layer_types"] = text["layer_types"][:layers]
    return config


CONFIG = small_config()


def recipe(bits: dict[str, int] | None = None, **quantize: Any) -> Recipe:
    section = {"bits": {"experts": 2, "gdn_in": 8, "shared_expert": 8} if bits is None else bits, **quantize}
    return parse_recipe({"schema": "q38.recipe/1", "name": "test", "quantize": section})


dense = st.sampled_from([2, 3, 4, 8, HIGH])
recipes = st.builds(
    lambda experts, gdn_in, gdn_out, attention, shared, mtp: recipe(
        {"experts": experts, "gdn_in": gdn_in, "gdn_out": gdn_out, "attention": attention, "shared_expert": shared},
        mtp=mtp,
    ),
    st.sampled_from([2, 3, 4, 8]), dense, dense, dense, dense, st.sampled_from(["drop", "keep"]),
)  # fmt: skip


@settings(max_examples=25)
@given(recipe=recipes, requantized=st.booleans())
def test_both_engines_read_every_module_at_its_planned_width(recipe: Recipe, requantized: bool) -> None:
    bits = plan_bits(CONFIG, recipe, requantized=requantized)
    config = quantization_config(bits, recipe)
    for name, width in bits.items():
        if classify(name) is Group.ROUTER:
            continue
        assert resolve_loader(name, config, bits).bits == width, name
        if classify(name) in (Group.EXPERTS, Group.MTP_EXPERTS):
            layer = name.partition(".experts.")[0] + ".experts"
            assert resolve_sglang(layer, config, kind="experts").bits == width, layer
        else:
            kind = "lm_head" if name == "lm_head" else "linear"
            assert resolve_sglang(name, config, kind=kind).bits == width, name
    for fused, members in fused_modules(bits).items():
        for packed in (None, PACKED):  # 0.5.23 drops the mapping; a later one may hand it over
            assert resolve_sglang(fused, config, packed=packed).bits == bits[members[0]], fused
    check_resolution(config, bits)


@settings(max_examples=10)
@given(recipe=recipes)
def test_every_entry_is_an_exact_name_with_all_its_fields(recipe: Recipe) -> None:
    bits = plan_bits(CONFIG, recipe)
    for name, entry in extra_config(bits, recipe).items():
        assert re.fullmatch(r"[\w.]+", name)
        assert name in bits or any(name.endswith(fused) for fused in FUSED)
        assert set(entry) == {"bits", "group_size", "sym", "data_type"}
        assert entry["data_type"] == ("fp" if entry["bits"] == HIGH else "int")


def test_all_fused_runtime_names_of_sglang_are_listed() -> None:
    bits = plan_bits(CONFIG, recipe())
    extra = extra_config(bits, recipe())
    assert extra[f"{LAYERS}.0.linear_attn.in_proj_qkvz"]["bits"] == 8
    assert extra[f"{LAYERS}.0.linear_attn.in_proj_ba"]["bits"] == HIGH
    assert extra[f"{LAYERS}.3.self_attn.qkv_proj"]["bits"] == 8
    assert extra[f"{LAYERS}.3.mlp.shared_expert.gate_up_proj"]["bits"] == 8


def test_shapes_that_autoround_skips_by_itself_are_listed_all_the_same() -> None:
    extra = extra_config(plan_bits(CONFIG, recipe()), recipe())
    for name in ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.shared_expert_gate"):
        assert extra[f"{LAYERS}.0.{name}"]["bits"] == HIGH
    assert extra[f"{LAYERS}.0.attn_hyper_connection.block_inject_weight"]["bits"] == HIGH


def test_what_defaults_to_two_bits_in_autoround_is_pinned_to_sixteen() -> None:
    extra = extra_config(plan_bits(CONFIG, recipe()), recipe())
    for name in ("1.ple.key_proj", "1.ple.value_proj", "3.self_attn.indexer.index_qk_proj"):
        assert extra[f"{LAYERS}.{name}"]["bits"] == HIGH


def test_the_requant_groups_count_as_eight_bit_only_in_the_finished_checkpoint() -> None:
    after, before = plan_bits(CONFIG, recipe()), plan_bits(CONFIG, recipe(), requantized=False)
    changed = {classify(name) for name in after if after[name] != before[name]}
    assert changed == {Group.GDN_OUT, Group.ATTENTION, Group.LM_HEAD}
    assert {after[n] for n in after if classify(n) in changed} == {8}


def test_dropped_mtp_is_not_planned_and_kept_mtp_is() -> None:
    assert not any(name.startswith("mtp.") for name in plan_bits(CONFIG, recipe()))
    assert any(name.startswith("mtp.") for name in plan_bits(CONFIG, recipe(mtp="keep")))


def test_kept_mtp_in_16_bit_stays_outside_the_quantized_blocks() -> None:
    bits = plan_bits(CONFIG, recipe(mtp="keep"))
    assert quantization_config(bits, recipe())["block_name_to_quantize"] == LAYERS


def test_quantized_mtp_experts_make_mtp_a_quantized_block() -> None:
    kept = recipe({"experts": 2, "mtp_experts": 2}, mtp="keep")
    bits = plan_bits(CONFIG, kept)
    config = quantization_config(bits, kept)
    assert config["block_name_to_quantize"] == f"{LAYERS},mtp.layers"
    assert resolve_sglang("mtp.layers.0.mlp.experts", config, kind="experts").bits == 2
    assert resolve_sglang("mtp.layers.0.self_attn.qkv_proj", config).bits == HIGH


def test_the_commonest_expert_width_is_the_base_and_the_rest_is_listed() -> None:
    bits = plan_bits(CONFIG, recipe())
    higher = {n: 3 if n.startswith(f"{LAYERS}.2.mlp.experts.") else w for n, w in bits.items()}
    assert base_bits(higher) == 2
    config = quantization_config(higher, recipe())
    assert resolve_sglang(f"{LAYERS}.2.mlp.experts", config, kind="experts").bits == 3
    check_resolution(config, higher)


def test_a_recipe_that_leaves_the_experts_alone_is_refused() -> None:
    with pytest.raises(InputError, match="leaves the experts in 16 bit"):
        quantization_config(plan_bits(CONFIG, recipe({"gdn_in": 8})), recipe())


def test_fused_members_of_different_widths_are_refused() -> None:
    bits = plan_bits(CONFIG, recipe())
    bits[f"{LAYERS}.3.self_attn.k_proj"] = HIGH
    with pytest.raises(InputError, match=r"qkv_proj: is one matrix .*k_proj 16"):
        extra_config(bits, recipe())


@pytest.mark.parametrize("group", ["gdn_gates", "hyper_connection"])
def test_a_group_with_a_matrix_that_cannot_be_packed_is_refused(group: str) -> None:
    with pytest.raises(InputError, match=rf"quantize\.bits\.{group}: .* cannot be packed"):
        plan_bits(CONFIG, recipe({"experts": 2, group: 8}, allow_low=[group]))


def test_a_group_size_that_does_not_divide_the_input_is_refused() -> None:
    with pytest.raises(InputError, match="in groups of 96"):
        plan_bits(CONFIG, recipe(group_size=96))


def test_a_stale_entry_is_found() -> None:
    bits = plan_bits(CONFIG, recipe())
    config = quantization_config(bits, recipe())
    config["extra_config"][f"{LAYERS}.3.self_attn.q_proj"]["bits"] = HIGH
    with pytest.raises(InputError, match=r"q_proj: AutoRound would read it at 16 bits"):
        check_resolution(config, bits)


def test_a_missing_fused_name_is_found() -> None:
    bits = plan_bits(CONFIG, recipe())
    config = quantization_config(bits, recipe())
    del config["extra_config"][f"{LAYERS}.0.linear_attn.in_proj_ba"]
    with pytest.raises(InputError, match="in_proj_ba: SGLang would read it at 2 bits"):
        check_resolution(config, bits)


def test_a_pattern_that_hides_a_module_from_one_engine_is_found() -> None:
    bits = plan_bits(CONFIG, recipe())
    config = quantization_config(bits, recipe())
    config["extra_config"] = {".*experts.0.up_proj": {"bits": 8}, **config["extra_config"]}
    with pytest.raises(InputError, match=r"experts\.0\.up_proj: AutoRound would read it at 8 bits"):
        check_resolution(config, bits)


def test_a_missing_group_size_outside_the_blocks_is_found() -> None:
    bits = plan_bits(CONFIG, recipe())
    config = quantization_config(bits, recipe())
    del config["extra_config"]["lm_head"]["group_size"]
    with pytest.raises(InputError, match="lm_head"):
        check_resolution(config, bits)


def test_the_real_model_needs_under_a_thousand_entries() -> None:
    bits = plan_bits(REAL, recipe())
    assert sum(classify(name) is Group.EXPERTS for name in bits) == 48 * 512 * 3
    assert len(extra_config(bits, recipe())) < 1000


@pytest.mark.parametrize(
    ("group", "packed", "left"),
    [
        ("hyper_connection", ".input_mix_weight_down", ".block_inject_weight"),
        ("shared_expert", ".down_proj", None),
        ("gdn_in", ".in_proj_qkv", None),
        ("gdn_out", ".out_proj", None),
    ],
)
def test_requant_int8_takes_what_can_be_packed_of_a_group(group: str, packed: str, left: str | None) -> None:
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "t",
            "source": {"synth": "tiny"},
            "quantize": {"bits": {"experts": 2}, "allow_low": ["hyper_connection"]},
            "requant_int8": {"groups": [group]},
        }
    )
    bits = plan_bits(CONFIG, recipe)
    of_group = {name: width for name, width in bits.items() if classify(name) == group}
    assert {width for name, width in of_group.items() if packed in name} == {8}
    assert {width for name, width in of_group.items() if left and left in name} == ({16} if left else set())
    check_resolution(quantization_config(bits, recipe), bits)


def test_a_requant_int8_group_that_cannot_be_packed_at_all_is_refused() -> None:
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "t",
            "source": {"synth": "tiny"},
            "quantize": {"bits": {"experts": 2}, "allow_low": ["gdn_gates"]},
            "requant_int8": {"groups": ["gdn_gates"]},
        }
    )
    with pytest.raises(InputError, match=r"in_proj_a \[48, 2560\] cannot be packed at 8 bits"):
        plan_bits(CONFIG, recipe)
