"""Known traps of AutoRound 0.16.1 with Qwen4-Exp, each against its remedy; those of `q38.quantize.adjustments` have
their tests in test_adjustments.py.

    a  taken for a multimodal model          test_adjustments: the_composite_model_takes_the_language_model_route
    b  a backslash in a pattern finds nothing, and the matrix falls to the base width                        here
    c  built-in pins of the shared expert    test_adjustments: without_our_ignore_list_the_shared_expert_is_pinned
    d  PLE, indexer and MTP fall to 2 bits; MTP is packed at 4 while its config says 2
                                             test_adjustments: a_matrix_that_falls_to_two_bits; here for MTP
    e  scales of an FP8 source ignored       test_adjustments: fp8_blocks_are_multiplied_by_their_scales
    f  the n-gram table built in memory      test_adjustments: neither_the_n_gram_table_nor_the_vision_tower_is_built
    g  the indexer's loop over queries       test_adjustments: short_rows_skip_the_loop_of_the_indexer
    h  experts stay on the meta device under renamed prefixes                                                here
    i  a packed lm_head keeps all finished blocks in memory
                                             test_adjustments: a_packed_matrix_outside_the_blocks; here for recipes
    j  torch.compile breaks the MoE block and the extended algorithm                                         here
    k  without steps the experts get plain rounding instead of the optimal one                               here
    l  AutoScheme deletes group_size         test_adjustments: autoscheme_leaves_the_norms_their_group_size
    m  matrices that are no multiple of 32 are skipped without a word                                        here
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from q38.base.errors import CheckFailed, InputError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import PackedMatrix, dequantize
from q38.model.names import LAYERS, Group, classify
from q38.quantize import autoround
from q38.quantize.adjustments import Run
from q38.quantize.driver import quantize
from q38.quantize.plan import Plan, make_plan
from q38.quantize.rtn import round_to_nearest
from q38.recipe.bits import check_resolution, quantization_config
from q38.recipe.resolve import Scheme, resolve_autoround
from q38.recipe.schema import Recipe
from tests.quantize.test_adjustments import prepared, run  # noqa: F401

INDEXER = f"{LAYERS}.3.self_attn.indexer.index_qk_proj"
UNEVEN = (
    "linear_attn.in_proj_a",
    "linear_attn.in_proj_b",
    "mlp.shared_expert_gate",
    "attn_hyper_connection.block_inject_weight",
)


def test_b_a_backslash_finds_nothing_so_the_run_would_be_refused(
    tiny_source: Path,
    plan: Plan,
    fast: Recipe,
    run: Run,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = {name: entry for name, entry in autoround.layer_config(plan).items() if name != INDEXER}
    entries[r".*indexer\.index_qk_proj$"] = {"bits": 16}
    assert resolve_autoround(INDEXER, entries, Scheme(2, 128), plan.bits).bits == 2
    monkeypatch.setattr(autoround, "layer_config", lambda plan: entries)
    with (
        prepared(tiny_source, plan, fast, run) as compressor,
        pytest.raises(CheckFailed, match="index_qk_proj: AutoRound resolved it to 2 bits"),
    ):
        autoround.check_resolved(compressor, plan)


def test_b_our_entries_hold_no_pattern(plan: Plan) -> None:
    assert all(name.replace(".", "").replace("_", "").isalnum() for name in autoround.layer_config(plan))


def test_d_mtp_experts_are_stored_at_the_width_that_the_config_says(
    tiny_source: Path, tiny_ple: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    """AutoRound tunes the blocks; MTP is outside them, rounded by us from the source."""
    recipe = vary(
        bits={"experts": 2, "mtp_experts": 2, "gdn_in": 8, "shared_expert": 8}, mtp="keep", vision="keep"
    )
    quantize(tiny_source, tmp_path / "out", recipe, ple=tiny_ple)
    source, out = Checkpoint.open(tiny_source), Checkpoint.open(tmp_path / "out")
    module = "mtp.layers.0.mlp.experts.3.down_proj"
    words, zeros, scales = (out.read(f"{module}.{field}") for field in PackedMatrix._fields)
    assert zeros.shape[1] * 32 // scales.shape[1] == 2
    fused = source.read("mtp.layers.0.mlp.experts.down_proj")[3]
    assert torch.equal(dequantize(words, zeros, scales, 2), dequantize(*round_to_nearest(fused, 2, 128), 2))
    plan = make_plan(source, recipe)
    config = out.config["quantization_config"]
    check_resolution(config, plan.bits)
    assert config["block_name_to_quantize"] == f"{LAYERS},mtp.layers"
    for name in source.tensors:
        if classify(name) in (Group.MTP, Group.VISION):
            assert out.read_bytes(name) == source.read_bytes(name), name
    assert out.config["text_config"]["mtp_num_hidden_layers"] == 1


def test_h_every_parameter_of_a_block_is_found_under_the_releases_names(
    tiny_source: Path,
    plan: Plan,
    fast: Recipe,
    run: Run,  # noqa: F811
) -> None:
    with prepared(tiny_source, plan, fast, run) as compressor:
        model = compressor.model_context.model
        for block in (0, 3):
            compressor._offloader.reload(model, f"{LAYERS}.{block}")
            parameters = dict(model.get_submodule(f"{LAYERS}.{block}").named_parameters())
            assert len(parameters) > 50
            assert not [name for name, parameter in parameters.items() if parameter.is_meta]


def test_i_a_recipe_that_packs_the_output_head_leaves_it_to_rounding(
    tiny_source: Path,
    vary: Callable[..., Recipe],
    run: Run,  # noqa: F811
) -> None:
    recipe = vary(bits={"experts": 2, "lm_head": 8})
    plan = make_plan(Checkpoint.open(tiny_source), recipe)
    assert plan.bits["lm_head"] == 8
    assert "lm_head" not in autoround.layer_config(plan)
    with prepared(tiny_source, plan, recipe, run) as compressor:
        assert compressor.compress_context.is_immediate_saving
        autoround.check_resolved(compressor, plan)


def test_j_nothing_is_compiled(
    tiny_source: Path,
    plan: Plan,
    fast: Recipe,
    run: Run,  # noqa: F811
) -> None:
    with prepared(tiny_source, plan, fast, run) as compressor:
        assert compressor.enable_torch_compile is False
        assert compressor.compress_context.enable_torch_compile is False


@pytest.mark.parametrize("method", ["autoround", "expert-local", "expert-local-gsq"])
def test_k_a_tuning_method_without_steps_is_refused(method: str, vary: Callable[..., Recipe]) -> None:
    with pytest.raises(InputError, match=r"experts: iters: .* without a step is plain rounding"):
        vary(experts={"method": method, "iters": 0})


def test_k_optimal_rounding_reaches_the_experts(
    tiny_source: Path, tiny_ple: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    module = f"{LAYERS}.0.mlp.experts.3.down_proj"
    scales = {}
    for method in ("rtn", "opt-rtn"):
        quantize(tiny_source, tmp_path / method, vary(experts={"method": method}), ple=tiny_ple, blocks="0")
        shards = sorted((tmp_path / method).glob("*.safetensors"))
        from safetensors import safe_open

        for shard in shards:
            with safe_open(shard, "pt") as file:
                names = set(file.keys())
                if f"{module}.scales" in names:
                    scales[method] = file.get_tensor(f"{module}.scales")
    changed = (scales["rtn"] != scales["opt-rtn"]).float().mean()
    assert changed > 0.5


def test_m_matrices_that_autoround_skips_are_named_all_the_same(plan: Plan, fast: Recipe) -> None:
    entries, config = autoround.layer_config(plan), quantization_config(plan.bits, fast)
    for name in UNEVEN:
        assert entries[f"{LAYERS}.0.{name}"] == {"bits": 16}
        assert config["extra_config"][f"{LAYERS}.0.{name}"]["bits"] == 16
