"""What would be written, derived before anything is."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.writer import write_safetensors
from q38.measure.stored import Stored
from q38.measure.structure import check_structure
from q38.model.expected import quantized_tensors
from q38.model.names import LAYERS, Group, classify
from q38.quantize.driver import quantize
from q38.quantize.plan import Plan, make_plan, natural_key
from q38.recipe.schema import Recipe


def test_it_lists_exactly_the_tensors_of_a_packed_checkpoint(plan: Plan, tiny_source: Path) -> None:
    config = Checkpoint.open(tiny_source).config
    expected = {t.name: t.shape for t in quantized_tensors(config, plan.bits, 128, mtp=False, vision=False)}
    assert {part.name: part.shape for shard in plan.shards for part in shard.parts} == expected


def test_both_source_layouts_give_the_same_tensors(plan: Plan, tiny_source_fp8: Path, fast: Recipe) -> None:
    from_fp8 = make_plan(Checkpoint.open(tiny_source_fp8), fast)
    tensors = [
        {(p.name, p.dtype, p.shape) for s in side.shards for p in s.parts} for side in (plan, from_fp8)
    ]
    assert tensors[0] == tensors[1]


def test_each_block_has_its_own_shard_in_order(plan: Plan) -> None:
    assert [shard.block for shard in plan.blocks] == list(range(plan.shape.num_layers))
    for shard in plan.blocks:
        assert all(part.name.startswith(f"{LAYERS}.{shard.block}.") for part in shard.parts)


def test_the_n_gram_table_is_left_out_and_its_constants_are_kept(plan: Plan) -> None:
    groups = [classify(part.name) for shard in plan.shards for part in shard.parts]
    assert Group.NGRAM not in groups
    assert groups.count(Group.NGRAM_META) == 3


def test_kept_mtp_and_vision_get_shards_of_their_own(tiny_source: Path, vary: Callable[..., Recipe]) -> None:
    kept = make_plan(Checkpoint.open(tiny_source), vary(mtp="keep", vision="keep"))
    units = {shard.unit: {p.kind for p in shard.parts} for shard in kept.shards if shard.block is None}
    assert units == {"outside": {"copy"}, "mtp": {"copy"}, "vision": {"copy"}}


def test_kept_mtp_experts_of_an_fp8_source_become_bf16(
    tiny_source_fp8: Path, vary: Callable[..., Recipe]
) -> None:
    kept = make_plan(Checkpoint.open(tiny_source_fp8), vary(mtp="keep"))
    experts = [p for s in kept.shards for p in s.parts if classify(p.name) is Group.MTP_EXPERTS]
    assert experts
    assert {(p.kind, p.dtype) for p in experts} == {("dequantize", "BF16")}


def test_kept_mtp_experts_of_a_bf16_source_become_one_matrix_each(
    tiny_source: Path, tiny_ple: Path, vary: Callable[..., Recipe], tmp_path: Path
) -> None:
    quantize(tiny_source, tmp_path / "out", vary(mtp="keep", experts={"method": "rtn"}))
    source, out = Checkpoint.open(tiny_source), Checkpoint.open(tmp_path / "out")
    gate_up, down = (
        source.read(f"mtp.layers.0.mlp.experts.{name}") for name in ("gate_up_proj", "down_proj")
    )
    for e in (0, 5):
        gate, up = gate_up[e].chunk(2)
        for name, matrix in (("gate_proj", gate), ("up_proj", up), ("down_proj", down[e])):
            assert torch.equal(out.read(f"mtp.layers.0.mlp.experts.{e}.{name}.weight"), matrix), name
    checks = {
        check.name: check for check in check_structure(Stored.open(tmp_path / "out"), ple=tiny_ple).checks
    }
    assert {name: check.faults for name, check in checks.items() if check.passed is False} == {}


def test_names_sort_by_number() -> None:
    assert sorted(["layers.10.a", "layers.9.b", "layers.9.a"], key=natural_key) == [
        "layers.9.a", "layers.9.b", "layers.10.a",
    ]  # fmt: skip


def test_a_source_without_a_matrix_to_pack_is_refused(
    tiny_source: Path, fast: Recipe, tmp_path: Path
) -> None:
    checkpoint = Checkpoint.open(tiny_source)
    gone = f"{LAYERS}.0.linear_attn.in_proj_z.weight"
    less = Checkpoint(
        checkpoint.path, checkpoint.config, checkpoint.headers,
        {name: info for name, info in checkpoint.tensors.items() if name != gone},
    )  # fmt: skip
    with pytest.raises(InputError, match=r"in_proj_z\.weight is missing"):
        make_plan(less, fast)


def test_fp8_codes_without_their_scale_are_refused(
    tiny_source_fp8: Path, fast: Recipe, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_source_fp8, broken)
    checkpoint = Checkpoint.open(broken)
    lost = f"{LAYERS}.0.mlp.experts.0.up_proj.weight_scale_inv"
    file = checkpoint.info(lost).file
    rest = {
        n: checkpoint.read(n) for n, info in checkpoint.tensors.items() if info.file == file and n != lost
    }
    write_safetensors(file, rest)
    index = broken / "model.safetensors.index.json"
    index.write_text(
        "\n".join(line for line in index.read_text().replace(",", ",\n").splitlines() if lost not in line)
    )
    with pytest.raises(InputError, match=r"up_proj\.weight is fp8 and .*weight_scale_inv is missing"):
        make_plan(Checkpoint.open(broken), fast)


def test_a_recipe_that_packs_nothing_is_refused(tiny_source: Path, fast: Recipe) -> None:
    high = fast.model_copy(update={"quantize": fast.quantize.model_copy(update={"bits": {Group.GDN_IN: 8}})})
    with pytest.raises(InputError, match="leaves the experts in 16 bit"):
        make_plan(Checkpoint.open(tiny_source), high)
