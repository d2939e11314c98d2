"""The hooks that change one call: the rotary cache's check, and the clamp before an fp8 cast."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q38.sglang_ext import fp8_clamp, residency, rope, staging, steps
from q38.sglang_ext.gate import Gate
from q38.sglang_ext.packed import keep_mapping
from q38.sglang_ext.selection import for_sglang

FP8 = torch.float8_e4m3fn


def write(k: torch.Tensor, v: torch.Tensor, *, dtype: torch.dtype = FP8, **scales: Any) -> list[torch.Tensor]:
    """What reaches SGLang's own function."""
    seen: list[torch.Tensor] = []

    def original(
        _self: Any, _layer: Any, _loc: Any, cache_k: Any, cache_v: Any, *_rest: Any, **_kw: Any
    ) -> None:
        seen.extend([cache_k, cache_v])

    pool = SimpleNamespace(dtype=dtype, is_quantized_kv_cache=False)
    fp8_clamp.set_kv_buffer(original, pool, None, None, k, v, **scales)
    return seen


def test_what_fp8_cannot_hold_saturates() -> None:
    k, v = torch.tensor([500.0, -1e6, 3.0]), torch.tensor([float("inf"), 448.0, -448.5])
    cut_k, cut_v = write(k, v)
    assert cut_k.tolist() == [448.0, -448.0, 3.0]
    assert cut_v.tolist() == [448.0, 448.0, -448.0]
    assert not cut_v.to(FP8).float().isnan().any()
    assert k[0] == 500  # the caller's own tensor is not written


def test_the_limit_is_that_of_the_scaled_value() -> None:
    cut_k, cut_v = write(torch.tensor([500.0]), torch.tensor([500.0]), k_scale=2.0, v_scale=0.5)
    assert (cut_k.item(), cut_v.item()) == (500.0, 224.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_other_caches_get_the_tensors_themselves(dtype: torch.dtype) -> None:
    k, v = torch.tensor([1e6]), torch.tensor([1e6])
    assert [t is o for t, o in zip(write(k, v, dtype=dtype), (k, v), strict=True)] == [True, True]


def test_the_indexer_never_asks_for_the_largest_position() -> None:
    asked: list[bool] = []

    def project(_self: Any, *args: Any, ensure_cos_sin_cache: bool = True, **_kw: Any) -> tuple[Any, ...]:
        asked.append(ensure_cos_sin_cache)
        return args

    def turn(_self: Any, positions: Any, tensor: Any, ensure_cos_sin_cache: bool = True) -> None:
        asked.append(ensure_cos_sin_cache)

    assert rope.project_qk(project, None, 1, 2, 3, 4, 5, True) == (1, 2, 3, 4, 5)
    rope.project_qk(project, None, 1, 2, ensure_cos_sin_cache=True)
    rope.apply_rope(turn, None, 1, 2)
    rope.apply_rope(turn, None, 1, 2, True)
    assert asked == [False] * 4


def test_a_configuration_without_a_mapping_gets_an_empty_one() -> None:
    given: list[Any] = []
    config = SimpleNamespace(update_packed_modules_mapping=given.append)
    assert keep_mapping(config, object, {}) is config
    keep_mapping(config, object, {"packed_modules_mapping": {"a": ["b"]}})
    assert given == [{}, {"a": ["b"]}]


@pytest.mark.parametrize(
    ("name", "passes"),
    [
        ("model.language_model.layers.3.mlp.experts.7.up_proj.qweight", False),
        ("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_4.weight", False),
        ("model.language_model.layers.1.ple.ple_embedding.layer_multipliers", True),
        ("mtp.layers.0.mlp.experts.7.up_proj.qweight", False),
        ("mtp.fc.weight", False),
        ("model.language_model.layers.3.mlp.shared_expert.up_proj.qweight", True),
        ("lm_head.qweight", True),
        ("model.visual.blocks.0.attn.qkv.weight", True),
    ],
)
def test_rows_and_table_do_not_pass_through_sglangs_loader(name: str, passes: bool) -> None:
    assert for_sglang(name, table_on_disk=True) is passes


def test_a_table_that_was_not_split_off_is_sglangs_to_load() -> None:
    name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_4.weight"
    assert for_sglang(name, table_on_disk=False)


@pytest.mark.parametrize(("stored", "largest"), [(FP8, 448.0), (torch.bfloat16, 500.0)])
def test_the_fused_decode_path_gets_what_its_cache_can_hold(stored: torch.dtype, largest: float) -> None:
    seen: list[torch.Tensor] = []

    def original(_self: Any, _q: Any, k: Any, v: Any, _layer: Any, *_rest: Any) -> str:
        seen.extend([k, v])
        return "attended"

    pool = SimpleNamespace(get_key_buffer=lambda layer: torch.empty(0, dtype=stored))
    backend, layer = SimpleNamespace(token_to_kv_pool=pool), SimpleNamespace(layer_id=0)
    k = torch.tensor([500.0])
    assert (
        fp8_clamp.fused_kv_attention(original, backend, None, k, -k, layer, "batch", "indices") == "attended"
    )
    assert [t.item() for t in seen] == [largest, -largest]
    assert fp8_clamp.fused_kv_attention(original, backend, None, None, None, layer) == "attended"


@pytest.mark.parametrize(("overlap", "stream"), [(False, None), (True, "forward")])
def test_rows_move_against_the_stream_that_steps_are_enqueued_on(
    monkeypatch: pytest.MonkeyPatch, overlap: bool, stream: str | None
) -> None:
    """With overlap scheduling that is not the current one."""
    happened: list[Any] = []

    def original(_self: Any, *args: Any) -> str:
        happened.append(args)
        return "done"

    allocator = SimpleNamespace(available_size=lambda: 60)
    scheduler = SimpleNamespace(
        enable_overlap=overlap,
        forward_stream="forward",
        max_total_num_tokens=64,
        token_to_kv_pool_allocator=allocator,
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: True))
    monkeypatch.setattr(residency, "_rows", None)
    assert steps.run_batch(original, scheduler, batch) == "done"  # another model: not q38's business
    others: dict[str, Any] = {}
    stored = SimpleNamespace(gate=Gate(), others=others, follow_stream=happened.append, staging=None)
    monkeypatch.setattr(residency, "_rows", stored)
    assert steps.run_batch(original, scheduler, batch) == "done"
    assert happened == [(batch,), stream, (batch,)]
    assert others["kv"]() == {"used": 4, "total": 64}


@pytest.mark.parametrize(("ids", "refused"), [([0, 5], False), ([9], False), ([5, 10], True), ([-1], True), ([], False), (None, False)])  # fmt: skip
def test_a_token_outside_the_vocabulary_is_refused_where_it_arrives(ids: Any, refused: bool) -> None:
    from q38.sglang_ext.token_ids import validate_one_request

    seen: list[Any] = []
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=10))

    def original(_self: Any, _request: Any, given: Any) -> None:
        seen.append(given)

    if refused:
        with pytest.raises(ValueError, match="outside the vocabulary, which has 10"):
            validate_one_request(original, manager, None, ids)
    else:
        validate_one_request(original, manager, None, ids)
    assert seen == [ids]


def test_rows_that_cannot_be_read_end_the_process_after_the_other_tensors(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """They are read on a thread; its refusal must not get lost there."""
    from q38.base.errors import ResourceError
    from q38.sglang_ext import residency
    from q38.sglang_ext.options import ExtensionOptions
    from q38.sglang_ext.weights import _Rows

    def refuse(*_arguments: Any) -> None:
        raise ResourceError("no room for them", where="expert rows")

    monkeypatch.setattr(residency, "open_rows", refuse)
    for starts in (True, False):
        rows = _Rows(None, ExtensionOptions("m"), torch.device("cpu"))  # type: ignore[arg-type]
        if starts:
            rows.start()
        with pytest.raises(SystemExit) as ended:
            rows.finish()
        assert ended.value.code == 3
        assert "q38: expert rows: no room for them" in capfd.readouterr().err


def test_a_prompt_step_that_is_read_in_place_plans_nothing_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    found: Any = object.__new__(staging.PrefillStaging)
    found.ring = SimpleNamespace(begin=lambda *_: done.append("begin"), expects=lambda _layer: False)
    found._fewest = 100
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def follow(_self: Any) -> None:
        done.append("follow")
        found._fewest = 300

    monkeypatch.setattr(staging.PrefillStaging, "_follow_rows", follow)
    found.begin(99)
    assert found.layer(0, 99) is None
    assert done == []
    found.begin(200)  # by the new placement, it is one too
    assert found.layer(0, 200) is None
    assert done == ["follow"]
    found.begin(300)
    assert done == ["follow", "follow", "begin"]
