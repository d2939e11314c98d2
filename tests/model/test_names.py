"""Groups, layers and module names of real tensor names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.model import names
from q38.model.names import (
    EXPERT,
    FUSED_EXPERTS,
    KEEP_HIGH,
    NGRAM_SCALE,
    NGRAM_SHARD,
    PACKABLE,
    Group,
    classify,
    layer_of,
    module_of,
)

LAYER = "model.language_model.layers.11"
TABLE = "model.language_model.layers.1.ple.ple_embedding"
GROUPS = {
    f"{TABLE}.ngram_embedding.shard_127.weight": Group.NGRAM,
    f"{TABLE}.ngram_embedding.weight_scale": Group.NGRAM,
    f"{TABLE}.layer_multipliers": Group.NGRAM_META,
    f"{TABLE}.ngram_heads_vocab_sizes": Group.NGRAM_META,
    f"{TABLE}.ngram_heads_offsets": Group.NGRAM_META,
    "model.language_model.layers.1.ple.key_proj.weight": Group.PLE,
    "model.language_model.layers.1.ple.conv1d.weight": Group.PLE,
    "model.language_model.layers.1.ple.norm_key.weight": Group.PLE,
    "mtp.layers.0.mlp.experts.gate_up_proj": Group.MTP_EXPERTS,
    "mtp.layers.0.mlp.experts.3.up_proj.weight": Group.MTP_EXPERTS,
    "mtp.layers.0.self_attn.q_proj.weight": Group.MTP,
    "mtp.layers.0.mlp.shared_expert.up_proj.weight": Group.MTP,
    "mtp.hyper_connection_mixer.hc_norm.weight": Group.MTP,
    "mtp.pre_fc_norm_hidden.weight": Group.MTP,
    "model.visual.blocks.26.norm1.weight": Group.VISION,
    "model.visual.merger.norm.bias": Group.VISION,
    f"{LAYER}.attn_hyper_connection.hc_norm.weight": Group.HYPER_CONNECTION,
    f"{LAYER}.mlp_hyper_connection.block_inject_weight.weight": Group.HYPER_CONNECTION,
    "model.language_model.hyper_connection_mixer.input_mix_weight_up.weight": Group.HYPER_CONNECTION,
    f"{LAYER}.mlp.gate.weight": Group.ROUTER,
    f"{LAYER}.mlp.shared_expert_gate.weight": Group.SHARED_EXPERT_GATE,
    f"{LAYER}.mlp.shared_expert.down_proj.weight": Group.SHARED_EXPERT,
    f"{LAYER}.mlp.experts.gate_up_proj": Group.EXPERTS,
    f"{LAYER}.mlp.experts.down_proj": Group.EXPERTS,
    f"{LAYER}.mlp.experts.511.gate_proj.weight": Group.EXPERTS,
    f"{LAYER}.mlp.experts.511.gate_proj.weight_scale_inv": Group.EXPERTS,
    f"{LAYER}.mlp.experts.511.gate_proj.qzeros": Group.EXPERTS,
    f"{LAYER}.linear_attn.A_log": Group.GDN_STATE,
    f"{LAYER}.linear_attn.dt_bias": Group.GDN_STATE,
    f"{LAYER}.linear_attn.conv1d.weight": Group.GDN_STATE,
    f"{LAYER}.linear_attn.in_proj_a.weight": Group.GDN_GATES,
    f"{LAYER}.linear_attn.in_proj_b.weight": Group.GDN_GATES,
    f"{LAYER}.linear_attn.in_proj_qkv.weight": Group.GDN_IN,
    f"{LAYER}.linear_attn.in_proj_z.qweight": Group.GDN_IN,
    f"{LAYER}.linear_attn.out_proj.weight": Group.GDN_OUT,
    f"{LAYER}.linear_attn.norm.weight": Group.NORM,
    f"{LAYER}.self_attn.indexer.index_qk_proj.weight": Group.INDEXER,
    f"{LAYER}.self_attn.indexer.k_layernorm.weight": Group.INDEXER,
    f"{LAYER}.self_attn.q_proj.weight": Group.ATTENTION,
    f"{LAYER}.self_attn.o_proj.scales": Group.ATTENTION,
    f"{LAYER}.self_attn.q_norm.weight": Group.NORM,
    "model.language_model.embed_tokens.weight": Group.EMBED,
    "lm_head.weight": Group.LM_HEAD,
    "lm_head.qweight": Group.LM_HEAD,
    "model.language_model.layers.0.something_new.weight": Group.OTHER,
}


@pytest.mark.parametrize(("name", "group"), GROUPS.items())
def test_a_tensor_belongs_to_its_group(name: str, group: Group) -> None:
    assert classify(name) is group


@pytest.mark.parametrize(("name", "group"), [(n, g) for n, g in GROUPS.items() if n.endswith(".weight")])
def test_a_module_belongs_to_the_group_of_its_weight(name: str, group: Group) -> None:
    if group is not Group.NGRAM:  # its table is no matrix of a module
        assert classify(module_of(name)) is group


def test_every_group_but_other_has_a_rule() -> None:
    assert set(GROUPS.values()) == set(Group)


def test_sensitive_groups_include_those_whose_error_does_not_average_out() -> None:
    assert {Group.ROUTER, Group.GDN_STATE, Group.NGRAM_META, Group.INDEXER} <= KEEP_HIGH
    assert Group.EXPERTS not in KEEP_HIGH


def test_lookups_and_vectors_are_not_packable() -> None:
    assert not PACKABLE & {
        Group.NGRAM,
        Group.NGRAM_META,
        Group.EMBED,
        Group.NORM,
        Group.ROUTER,
        Group.GDN_STATE,
    }


@pytest.mark.parametrize(
    ("name", "layer"),
    [
        (f"{LAYER}.mlp.gate.weight", 11),
        ("mtp.layers.0.mlp.gate.weight", None),
        ("model.visual.layers.3.norm1.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_only_the_main_models_blocks_have_a_layer(name: str, layer: int | None) -> None:
    assert layer_of(name) == layer


@pytest.mark.parametrize(
    "suffix", [".weight", ".bias", ".weight_scale", ".weight_scale_inv", ".qweight", ".qzeros", ".scales"]
)
def test_parameters_of_a_module_share_its_name(suffix: str) -> None:
    assert module_of(f"{LAYER}.self_attn.q_proj{suffix}") == f"{LAYER}.self_attn.q_proj"


def test_a_tensor_that_is_no_modules_parameter_keeps_its_name() -> None:
    for name in (f"{LAYER}.mlp.experts.gate_up_proj", f"{LAYER}.linear_attn.A_log"):
        assert module_of(name) == name


@given(st.integers(0, 999))
def test_shards_are_found_with_their_number(n: int) -> None:
    match = NGRAM_SHARD.match(f"{TABLE}.ngram_embedding.shard_{n}.weight")
    assert match
    assert int(match["n"]) == n
    assert match["prefix"] == f"{TABLE}.ngram_embedding"


@given(st.integers(0, 999), st.integers(0, 999), st.sampled_from(["gate_proj", "up_proj", "down_proj"]))
def test_an_expert_matrix_is_taken_apart(layer: int, expert: int, projection: str) -> None:
    match = EXPERT.match(f"model.language_model.layers.{layer}.mlp.experts.{expert}.{projection}.qweight")
    assert match
    assert (int(match["n"]), int(match["expert"]), match["proj"]) == (layer, expert, projection)


def test_fused_and_single_experts_are_told_apart() -> None:
    fused, single = f"{LAYER}.mlp.experts.down_proj", f"{LAYER}.mlp.experts.0.down_proj.weight"
    assert FUSED_EXPERTS.match(fused)
    assert not EXPERT.match(fused)
    assert EXPERT.match(single)
    assert not FUSED_EXPERTS.match(single)
    assert not EXPERT.match(f"{LAYER}.mlp.shared_expert.down_proj.weight")


def test_the_tables_scale_is_no_shard() -> None:
    scale = f"{TABLE}.ngram_embedding.weight_scale"
    assert NGRAM_SCALE.search(scale)
    assert not NGRAM_SHARD.match(scale)


def test_group_names_can_be_keys_of_a_recipe() -> None:
    assert all(re.fullmatch(r"[a-z_]+", group.value) for group in Group)


@given(st.integers(0, 99), st.integers(0, 999), st.sampled_from(["gate", "up", "down"]))
def test_the_short_way_to_the_experts_agrees_with_the_rules(layer, expert, proj):
    for suffix in ("", ".weight", ".qweight", ".qzeros", ".scales", ".weight_scale_inv"):
        name = f"model.language_model.layers.{layer}.mlp.experts.{expert}.{proj}_proj{suffix}"
        pattern = re.sub(r"(?<=[._])\d+", "0", name)
        assert classify(name) is names._classify_pattern(pattern) is Group.EXPERTS
