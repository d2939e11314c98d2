"""Each adjustment against the symptom it prevents, and that all of them are undone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q38.base.errors import CheckFailed, InputError, ResourceError
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import Checkpoint
from q38.model.names import LAYERS
from q38.ple.reader import PleTable
from q38.quantize import adjustments, autoround
from q38.quantize.adjustments import ADJUSTMENTS, Run, adjusted
from q38.quantize.blockstate import BlockState
from q38.quantize.plan import Plan
from q38.recipe.resolve import Scheme, resolve_autoround
from q38.recipe.schema import Recipe

EXPERT = f"{LAYERS}.0.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def run(tiny_ple: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    state = BlockState(tmp_path_factory.mktemp("state"), done=0, total=4, seed=0, finished=lambda block: None)
    return Run(PleTable.open(tiny_ple), state, torch.float32)


@contextmanager
def prepared(source: Path, plan: Plan, recipe: Recipe, run: Run, without: str = "") -> Iterator[Any]:
    """AutoRound's compressor, ready to tune, with all adjustments but one."""
    ids = torch.zeros(8, 64, dtype=torch.int64)
    with adjusted(run, without=[without]):
        compressor = autoround.build(source, plan, recipe, ids, device="cpu")
        compressor.output_dir = compressor.compress_context.output_dir = "unused"
        compressor.shard_writer = SimpleNamespace()
        compressor.post_init()
        yield compressor


@pytest.fixture(scope="module")
def compressor(tiny_source: Path, plan: Plan, fast: Recipe, run: Run) -> Any:
    """Prepared with all adjustments; its model is built, no block is read."""
    with prepared(tiny_source, plan, fast, run) as compressor:
        return compressor


def test_every_adjustment_says_what_it_prevents() -> None:
    assert len({a.name for a in ADJUSTMENTS}) == len(ADJUSTMENTS)
    assert all(len(a.prevents) > 20 for a in ADJUSTMENTS)


def test_all_adjustments_are_undone_after_the_run(run: Run) -> None:
    from auto_round import special_model_handler
    from auto_round.auto_scheme import delta_loss
    from auto_round.compressors import orchestrator
    from auto_round.utils import disk_stream_util, model, resume
    from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

    def snapshot() -> list[Any]:
        return [
            model._LLM_ONLY_MODEL_TYPES, special_model_handler._PRE_DEFINED_IGNORE_LAYERS, resume.ResumeState, orchestrator.tqdm,
            disk_stream_util.SafetensorsIndex.read_tensors, disk_stream_util.build_meta_model, delta_loss.remove_quant_scheme,
            modeling.Qwen4ExpTextNGramEmbedding.__init__, modeling.Qwen4ExpTextQSAIndexer.forward, modeling.Qwen4ExpModel.__init__,
        ]  # fmt: skip

    before = snapshot()
    with pytest.raises(ZeroDivisionError), adjusted(run):
        assert all(a is not b for a, b in zip(before, snapshot(), strict=True))
        raise ZeroDivisionError
    assert all(a is b for a, b in zip(before, snapshot(), strict=True))


def test_another_version_of_autoround_is_refused_with_the_supported_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.17.0")
    with pytest.raises(
        InputError, match=r"auto-round: version 0\.17\.0 is not supported; supported: 0\.16\.1"
    ):
        adjustments.require_supported()


def test_a_missing_autoround_is_a_missing_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ResourceError, match="AutoRound is not installed"):
        adjustments.require_supported()


def test_the_composite_model_takes_the_language_model_route(tiny_source: Path, run: Run) -> None:
    from auto_round.utils.model import detect_model_type

    with adjusted(run):
        assert detect_model_type(str(tiny_source)) == "llm"
    with adjusted(run, without=["language-model-route"]):
        assert detect_model_type(str(tiny_source)) == "mllm"


def test_every_matrix_is_resolved_to_its_planned_width(plan: Plan, compressor: Any) -> None:
    autoround.check_resolved(compressor, plan)
    model = compressor.model_context.model
    assert model.get_submodule(f"{LAYERS}.0.mlp.shared_expert.up_proj").bits == 8
    assert model.get_submodule(f"{LAYERS}.1.ple.key_proj").bits == 16


def test_without_our_ignore_list_the_shared_expert_is_pinned_and_the_run_refused(
    tiny_source: Path, plan: Plan, fast: Recipe, run: Run
) -> None:
    with (
        prepared(tiny_source, plan, fast, run, without="own-ignore-list") as compressor,
        pytest.raises(
            CheckFailed, match=r"shared_expert\.\w+: AutoRound resolved it to 16 bits, the recipe says 8"
        ),
    ):
        autoround.check_resolved(compressor, plan)


def test_a_matrix_that_falls_to_two_bits_is_refused_before_tuning(
    tiny_source: Path, plan: Plan, fast: Recipe, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlisted = f"{LAYERS}.3.self_attn.indexer.index_qk_proj"
    entries = {name: entry for name, entry in autoround.layer_config(plan).items() if name != unlisted}
    monkeypatch.setattr(autoround, "layer_config", lambda plan: entries)
    with (
        prepared(tiny_source, plan, fast, run) as compressor,
        pytest.raises(
            CheckFailed, match="index_qk_proj: AutoRound resolved it to 2 bits, the recipe says 16"
        ),
    ):
        autoround.check_resolved(compressor, plan)


def test_a_packed_matrix_outside_the_blocks_would_fill_the_memory_and_is_refused(
    tiny_source: Path, plan: Plan, fast: Recipe, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {**autoround.layer_config(plan), "lm_head": {"bits": 8, "group_size": 128, "sym": True}}
    monkeypatch.setattr(autoround, "layer_config", lambda plan: entries)
    with (
        prepared(tiny_source, plan, fast, run) as compressor,
        pytest.raises(CheckFailed, match="keep all finished blocks in memory"),
    ):
        autoround.check_resolved(compressor, plan)


def test_layer_config_holds_exact_names_that_autoround_resolves_as_planned(plan: Plan) -> None:
    entries = autoround.layer_config(plan)
    assert set(entries) <= set(plan.bits)
    for name, width in plan.bits.items():
        if name.startswith(LAYERS) and not name.endswith(".mlp.gate"):
            assert resolve_autoround(name, entries, Scheme(plan.base_bits, 128), plan.bits).bits == width


def test_every_token_of_every_row_reaches_autoround_unmasked(compressor: Any) -> None:
    batches = compressor.dataset
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(4, 64), (4, 64)]
    assert all(
        batch["attention_mask"] is None for batch in batches
    )  # else it masks the last token of each row


def test_fp8_blocks_are_multiplied_by_their_scales(tiny_source_fp8: Path, run: Run) -> None:
    from auto_round.utils.disk_stream_util import SafetensorsIndex

    source = Checkpoint.open(tiny_source_fp8)
    wanted = dequantize_blocks(source.read(EXPERT), source.read(EXPERT + "_scale_inv"))
    index = SafetensorsIndex(str(tiny_source_fp8))
    with adjusted(run):
        assert torch.equal(index.read_tensors([EXPERT])[EXPERT], wanted.float())
    with adjusted(run, without=["fp8-blocks"]):
        assert not torch.allclose(index.read_tensors([EXPERT])[EXPERT], wanted.float(), rtol=0.5)


def test_fp8_without_a_scale_stops_the_run(tiny_source_fp8: Path, run: Run) -> None:
    from auto_round.utils.disk_stream_util import SafetensorsIndex

    index = SafetensorsIndex(str(tiny_source_fp8))
    del index.weight_map[EXPERT + "_scale_inv"]
    with (
        adjusted(run),
        pytest.raises(InputError, match=r"up_proj\.weight is fp8 and has no \.weight_scale_inv"),
    ):
        index.read_tensors([EXPERT])


def test_blocks_are_streamed_in_the_dtype_of_the_activations(
    tiny_source: Path, plan: Plan, fast: Recipe, run: Run
) -> None:
    def dtypes(without: str) -> set[torch.dtype]:
        with prepared(tiny_source, plan, fast, run, without) as compressor:
            model = compressor.model_context.model
            compressor._offloader.reload(model, f"{LAYERS}.0")
            return {p.dtype for p in model.get_submodule(f"{LAYERS}.0").parameters()}

    assert dtypes("") == {torch.float32}
    assert torch.bfloat16 in dtypes("compute-dtype")


@pytest.mark.parametrize(
    ("adjustment", "part"),
    [("ngram-on-disk", "ngram_embedding.weight"), ("no-vision-tower", "model.visual.")],
)
def test_neither_the_n_gram_table_nor_the_vision_tower_is_built(
    adjustment: str, part: str, tiny_source: Path, plan: Plan, fast: Recipe, run: Run, compressor: Any
) -> None:
    assert not any(part in name for name, _ in compressor.model_context.model.named_parameters())
    with prepared(tiny_source, plan, fast, run, adjustment) as other:
        assert any(part in name for name, _ in other.model_context.model.named_parameters())


def test_short_rows_skip_the_loop_of_the_indexer(run: Run, compressor: Any) -> None:
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool).tril()
    indexer = compressor.model_context.model.get_submodule(f"{LAYERS}.3.self_attn.indexer")
    hidden = torch.empty(1, 64, 256, device="meta")  # the loop would need values
    with adjusted(run):
        assert indexer(hidden, (None, None), mask, None) is mask
    with adjusted(run, without=["short-qsa"]), pytest.raises(TypeError):
        indexer(hidden, (None, None), mask, None)


def test_autoscheme_leaves_the_norms_their_group_size(run: Run) -> None:
    from auto_round.auto_scheme import utils
    from transformers.models.qwen4_exp.modeling_qwen4_exp import Qwen4ExpTextRMSNorm

    def after_removal(without: str) -> bool:
        model = torch.nn.Sequential(Qwen4ExpTextRMSNorm(8, group_size=4), torch.nn.Linear(8, 8))
        model[1].group_size = 128
        with adjusted(run, without=[without]):
            utils.remove_quant_scheme(model)
        assert not hasattr(model[1], "group_size")
        return hasattr(model[0], "group_size")

    assert after_removal("")
    assert not after_removal("norm-group-size")


def test_autorounds_resume_state_is_ours(run: Run) -> None:
    from auto_round.utils import resume

    with adjusted(run):
        assert resume.ResumeState("directory", "signature", ["block"]) is run.state


def test_autoround_draws_no_bar(run: Run) -> None:
    from auto_round.compressors import orchestrator

    with adjusted(run):
        assert orchestrator.tqdm(range(3)).disable
