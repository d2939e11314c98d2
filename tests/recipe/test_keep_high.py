"""Sensitive modules stay in 16 bit unless a recipe lowers their group by name."""

from __future__ import annotations

from typing import Any

import pytest

from q38.base.errors import InputError
from q38.model.names import KEEP_HIGH, LAYERS, PACKABLE, Group, classify
from q38.recipe.bits import plan_bits
from q38.recipe.resolve import HIGH
from q38.recipe.schema import load_recipe, parse_recipe
from tests.recipe.test_bits import CONFIG, REAL

# Every sensitive module of the release: routing, norms, residual mixing, lookups, recurrence.
SENSITIVE = {
    f"{LAYERS}.0.mlp.gate.weight": Group.ROUTER,
    f"{LAYERS}.0.mlp.shared_expert_gate.weight": Group.SHARED_EXPERT_GATE,
    f"{LAYERS}.3.self_attn.q_norm.weight": Group.NORM,
    f"{LAYERS}.0.linear_attn.norm.weight": Group.NORM,
    f"{LAYERS}.0.attn_hyper_connection.input_mix_weight_down.weight": Group.HYPER_CONNECTION,
    f"{LAYERS}.0.mlp_hyper_connection.input_mix_weight_up.weight": Group.HYPER_CONNECTION,
    f"{LAYERS}.0.attn_hyper_connection.block_inject_weight.weight": Group.HYPER_CONNECTION,
    f"{LAYERS}.0.mlp_hyper_connection.hc_norm.weight": Group.HYPER_CONNECTION,
    "model.language_model.hyper_connection_mixer.input_mix_weight_down.weight": Group.HYPER_CONNECTION,
    f"{LAYERS}.1.ple.key_proj.weight": Group.PLE,
    f"{LAYERS}.1.ple.value_proj.weight": Group.PLE,
    f"{LAYERS}.1.ple.conv1d.weight": Group.PLE,
    f"{LAYERS}.3.self_attn.indexer.index_qk_proj.weight": Group.INDEXER,
    f"{LAYERS}.0.linear_attn.in_proj_a.weight": Group.GDN_GATES,
    f"{LAYERS}.0.linear_attn.in_proj_b.weight": Group.GDN_GATES,
    f"{LAYERS}.0.linear_attn.conv1d.weight": Group.GDN_STATE,
    f"{LAYERS}.0.linear_attn.A_log": Group.GDN_STATE,
    f"{LAYERS}.0.linear_attn.dt_bias": Group.GDN_STATE,
}


def recipe(**quantize: Any) -> Any:
    return parse_recipe({"schema": "q38.recipe/1", "name": "test", "quantize": quantize})


@pytest.mark.parametrize("name", SENSITIVE)
def test_a_sensitive_tensor_belongs_to_a_group_that_is_kept(name: str) -> None:
    assert classify(name) is SENSITIVE[name]
    assert SENSITIVE[name] in KEEP_HIGH


@pytest.mark.parametrize("group", sorted(KEEP_HIGH & PACKABLE))
def test_a_sensitive_group_is_lowered_only_by_name(group: Group) -> None:
    with pytest.raises(
        InputError, match=rf"bits\.{group}: a sensitive group below 16 bit; add it to allow_low"
    ):
        recipe(bits={"experts": 2, group: 8})
    assert recipe(bits={"experts": 2, group: 8}, allow_low=[group]).quantize.bits[group] == 8
    others = [other for other in KEEP_HIGH & PACKABLE if other != group]
    with pytest.raises(InputError, match="a sensitive group"):
        recipe(bits={"experts": 2, group: 8}, allow_low=others)


@pytest.mark.parametrize("group", sorted(KEEP_HIGH - PACKABLE))
def test_a_group_without_matrices_to_pack_cannot_be_lowered_at_all(group: Group) -> None:
    with pytest.raises(InputError, match="no packable matrices"):
        recipe(bits={"experts": 2, group: 8}, allow_low=[group])


def requant(*groups: str, **quantize: Any) -> Any:
    quantize = {"bits": {"experts": 2}, **quantize}
    return parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "test",
            "quantize": quantize,
            "requant_int8": {"groups": list(groups)},
        }
    )


@pytest.mark.parametrize("group", sorted(KEEP_HIGH & PACKABLE))
def test_a_sensitive_group_is_repacked_only_by_name(group: Group) -> None:
    with pytest.raises(InputError, match=rf"requant_int8\.groups: {group}: a sensitive group below 16 bit"):
        requant(group)
    assert requant(group, allow_low=[group]).requant_int8.groups == [group]


@pytest.mark.parametrize("group", sorted(set(Group) - PACKABLE))
def test_a_group_without_matrices_to_pack_cannot_be_repacked_at_all(group: Group) -> None:
    with pytest.raises(InputError, match=rf"requant_int8\.groups: {group}: .* no packable matrices"):
        requant(group, allow_low=[group])


def test_a_group_that_is_quantized_or_dropped_is_not_repacked_in_silence() -> None:
    with pytest.raises(InputError, match=r"attention: quantize\.bits lowers it to 4 bits already"):
        requant("lm_head", "attention", bits={"experts": 2, "attention": 4})
    with pytest.raises(InputError, match="mtp_experts: the recipe drops MTP"):
        requant("mtp_experts")
    assert requant("attention", bits={"experts": 2, "attention": 16}).requant_int8.groups == ["attention"]


def test_the_default_repacks_what_is_not_quantized_already() -> None:
    lowered = recipe(bits={"experts": 2, "attention": 4})
    assert lowered.requant_int8.groups == ["gdn_out", "lm_head"]
    assert parse_recipe(lowered.to_dict()) == lowered
    assert recipe(bits={"experts": 2}).requant_int8.groups == ["gdn_out", "attention", "lm_head"]


def test_an_override_reaches_the_plan_and_nothing_else() -> None:
    lowered = recipe(bits={"experts": 2, "indexer": 8, "ple": 8}, allow_low=["indexer", "ple"])
    before, after = plan_bits(CONFIG, recipe(bits={"experts": 2})), plan_bits(CONFIG, lowered)
    changed = {name: after[name] for name in after if after[name] != before[name]}
    assert changed == {
        f"{LAYERS}.1.ple.key_proj": 8, f"{LAYERS}.1.ple.value_proj": 8, f"{LAYERS}.3.self_attn.indexer.index_qk_proj": 8,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["quality-24gb", "quality-24gb-mtp", "fast", "tiny"])
def test_the_shipped_recipes_keep_every_sensitive_matrix(name: str) -> None:
    shipped = load_recipe(name)
    assert shipped.name == name
    assert shipped.quantize.allow_low == []
    plan = plan_bits(REAL, shipped)
    lowered = {classify(module) for module, width in plan.items() if width < HIGH}
    assert not lowered & KEEP_HIGH
    assert {plan[m] for m in plan if classify(m) is Group.EXPERTS} == {2}


def test_the_mtp_recipe_packs_the_mtp_experts_like_the_others_and_keeps_the_rest() -> None:
    plan = plan_bits(REAL, load_recipe("quality-24gb-mtp"))
    mtp = {m: w for m, w in plan.items() if m.startswith("mtp.")}
    assert {w for m, w in mtp.items() if classify(m) is Group.MTP_EXPERTS} == {2}
    assert {w for m, w in mtp.items() if classify(m) is Group.MTP} == {HIGH}
    without = plan_bits(REAL, load_recipe("quality-24gb"))
    assert {m: w for m, w in plan.items() if not m.startswith("mtp.")} == without


def test_bits_for_dropped_mtp_experts_are_a_contradiction() -> None:
    with pytest.raises(InputError, match="the recipe drops MTP"):
        recipe(bits={"experts": 2, "mtp_experts": 2})
