"""Attention straight from packed KV rows: the kernels against the reference, the reference against gather and softmax."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.settings import child_env
from q38.kernels import kv_attention
from q38.kernels.kv_attention import AttentionConfig, StoredRows, decode_attention
from q38.kernels.kv_attention_reference import attention_reference, gathered, valid_slots
from q38.kernels.kv_select import selected_slots
from q38.kvcache.layout import ROWS, TIERED, KvLayout
from q38.kvcache.pool import KvPool
from tests.kernels import attention_compile

CONTEXT, SLOTS, RING = 200, 300, 32
FORMATS = (*ROWS, "plain")
EVERY = pytest.mark.parametrize("name", FORMATS)


class Step(NamedTuple):
    """The arguments of one attention; `values` and `keys` of the same pool."""

    q: torch.Tensor
    keys: StoredRows
    values: StoredRows
    table: torch.Tensor
    requests: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor
    scale: float

    def on(self, device: str) -> Step:
        return Step(*(_moved(part, device) for part in self))


def _moved(part: Any, device: str) -> Any:
    if isinstance(part, StoredRows):
        ring = part.ring and tuple(t.to(device) for t in part.ring)
        return StoredRows(
            part.payload.to(device),
            None if part.scales is None else part.scales.to(device),
            part.kv,
            ring,  # type: ignore[arg-type]
        )
    return part.to(device) if isinstance(part, torch.Tensor) else part


def stored(name: str, heads: int, dim: int, seed: int) -> tuple[StoredRows, StoredRows]:
    """Keys and values of SLOTS slots. The ring was written round several times: owners of old slots are stale."""
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, SLOTS, heads, dim, generator=generator)
    if name == "plain":
        return StoredRows(k.half(), None, None), StoredRows(v.half(), None, None)
    pool = KvPool(KvLayout(name, 1, heads, dim, RING if name == TIERED else 0), SLOTS)
    order = torch.randperm(SLOTS, generator=generator)
    for part in order.split(RING // 2):
        pool.write(0, part, k[part], v[part])
    made = []
    for side in ("k", "v"):
        rows = pool.rows[0][side]  # type: ignore[index]
        made.append(StoredRows(rows.payload, rows.scales, pool.layout.rows, rows.tiers))
    return made[0], made[1]


@st.composite
def steps(draw: st.DrawFn) -> Step:
    """Any shape; positions from -1 to beyond the length, anywhere; lengths from 0 on; q from a wider tensor."""
    rows, heads, group = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 16))
    dim = draw(st.sampled_from([64, 128, 256]))
    topk, seed = draw(st.integers(1, 150)), draw(st.integers(0, 99))
    generator = torch.Generator().manual_seed(seed)
    keys, values = stored(draw(st.sampled_from(FORMATS)), heads, dim, seed)
    lengths = draw(st.lists(st.integers(0, CONTEXT), min_size=rows, max_size=rows))
    indices = torch.stack([torch.randperm(CONTEXT, generator=generator)[:topk] for _ in range(rows)]).int()
    indices[torch.rand(indices.shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.9]))] = -1
    table = torch.randint(0, SLOTS, (6, CONTEXT), dtype=torch.int32, generator=generator)
    wide = torch.randn(rows, heads * group + 2, dim, generator=generator)
    return Step(
        wide.to(draw(st.sampled_from([torch.float32, torch.float16])))[:, : heads * group],
        keys,
        values,
        table,
        torch.randint(0, 6, (rows,), generator=generator),
        indices,
        torch.tensor(lengths, dtype=torch.int32),
        draw(st.sampled_from([0.125, 1.0])),
    )


def plain_step(name: str, dtype: torch.dtype = torch.float32, rows: int = 3, topk: int = 130) -> Step:
    """Three rows of 12 query heads on two KV heads, all positions valid."""
    generator = torch.Generator().manual_seed(7)
    keys, values = stored(name, 2, 64, 7)
    return Step(
        torch.randn(rows, 12, 64, generator=generator).to(dtype),
        keys,
        values,
        torch.randint(0, SLOTS, (4, CONTEXT), dtype=torch.int32, generator=generator),
        torch.arange(rows) % 4,
        torch.stack([torch.randperm(CONTEXT, generator=generator)[:topk] for _ in range(rows)]).int(),
        torch.full((rows,), CONTEXT, dtype=torch.int32),
        0.125,
    )


def error(step: Step, out: torch.Tensor) -> float:
    """Largest difference from the reference."""
    return float((out.cpu() - attention_reference(*step)).abs().max())


@given(steps(), st.sampled_from([32, 64]), st.sampled_from([None, 1, 2, 7]))
@settings(max_examples=25)
def test_the_kernels_attend_as_the_reference_does(
    device: str, step: Step, block: int, splits: int | None
) -> None:
    config = AttentionConfig(block=block, warps=4, splits=splits)
    out = decode_attention(*step.on(device), config=config)
    assert out.dtype == step.q.dtype and out.is_contiguous()
    assert error(step, out) < (1e-4 if step.q.dtype == torch.float32 else 6e-3)


@EVERY
def test_one_valid_position_gives_its_values_to_the_bit(device: str, name: str) -> None:
    step = plain_step(name, torch.float16)
    step.indices[:, :77] = -1
    step.indices[:, 78:] = CONTEXT + 5
    out = decode_attention(*step.on(device)).cpu()
    for row in range(3):
        slots = valid_slots(step.table, step.requests[row], step.indices[row], step.lengths[row])
        (value,) = gathered(step.values, slots, 64, torch.float16)  # [heads, dim]
        assert torch.equal(out[row], value.repeat_interleave(6, 0))


@EVERY
def test_rows_without_a_valid_position_are_zeros(device: str, name: str) -> None:
    step = plain_step(name)
    step.lengths[0] = 0  # a padded row
    step.indices[1] = -1
    step.table[2] = -1  # slots that nobody was given
    for config in (None, AttentionConfig(block=32, splits=2)):
        assert not decode_attention(*step.on(device), config=config).any()
    assert not attention_reference(*step).any()


@EVERY
def test_a_padded_row_reads_slot_0_and_stays_finite(device: str, name: str) -> None:
    step = plain_step(name)
    step.table[0] = 0
    step.lengths[0] = 1
    step.indices[0] = -1
    step.indices[0, 0] = 0
    out = decode_attention(*step.on(device)).cpu()
    assert bool(out.isfinite().all())
    first = gathered(step.values, torch.tensor([0]), 64, torch.float32)[0]
    assert torch.equal(out[0], first.repeat_interleave(6, 0))


def test_the_bits_of_a_row_do_not_depend_on_the_rows_beside_it(device: str) -> None:
    step = plain_step(TIERED).on(device)
    together = decode_attention(*step)
    for row in range(3):
        at = slice(row, row + 1)
        alone = step._replace(
            q=step.q[at], requests=step.requests[at], indices=step.indices[at], lengths=step.lengths[at]
        )
        assert torch.equal(decode_attention(*alone), together[at])


def test_requests_and_lengths_may_have_more_rows_than_the_queries(device: str) -> None:
    step = plain_step("int8").on(device)
    few = step._replace(q=step.q[:1], indices=step.indices[:1], requests=step.requests.int())
    assert torch.equal(decode_attention(*few), decode_attention(*step)[:1])


def test_scores_far_apart_neither_overflow_nor_vanish(device: str) -> None:
    step = plain_step("int8")._replace(scale=1000.0)
    assert error(step, decode_attention(*step.on(device))) < 2e-3


def test_offsets_pass_32_bits(device: str) -> None:
    far = (
        2**31 // (2 * 256) + 1000
    )  # a slot whose codes begin beyond 2**31 bytes; only pages touched take memory
    payload = torch.empty(far + 1, 2, 256, dtype=torch.int8, device=device)
    scales = torch.empty(far + 1, 2, 4, dtype=torch.float16, device=device)
    payload[far], scales[far] = 3, 0.5
    rows = StoredRows(payload, scales, ROWS["int8"])
    table = torch.full((1, 4), far, dtype=torch.int32, device=device)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    q = torch.ones(1, 2, 256, dtype=torch.float16, device=device)
    out = decode_attention(q, rows, rows, table, zero, zero[:, None], zero + 1, 1.0)
    assert bool((out == 1.5).all())


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_reference_attends_to_the_bits_that_the_gather_gives(name: str, dtype: torch.dtype) -> None:
    """Today's path: slots of the runs, rows into a scratch, softmax over each run."""
    step = plain_step(name)
    step.indices[1, 90:] = -1
    step.lengths[2] = 50
    step.indices[2] = torch.cat([torch.arange(50), torch.full((80,), -1)]).int()
    step = step._replace(q=step.q.to(dtype))
    counts = ((step.indices >= 0) & (step.indices < step.lengths[:, None])).sum(1)
    starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
    slots = selected_slots(step.table, step.requests, step.indices, step.lengths, starts, 3, 130)
    scratch = [torch.zeros(len(slots), 2, 64, dtype=dtype) for _ in range(2)]
    for rows, out in zip((step.keys, step.values), scratch, strict=True):
        out[slots >= 0] = gathered(rows, slots[slots >= 0], 64, dtype)
    exact = attention_reference(*step)
    for row in range(3):
        run = slice(int(starts[row]), int(starts[row + 1]))
        mine = valid_slots(step.table, step.requests[row], step.indices[row], step.lengths[row])
        for rows, out in zip((step.keys, step.values), scratch, strict=True):
            assert torch.equal(gathered(rows, mine, 64, dtype), out[run])
        k, v = (part[run].double().repeat_interleave(6, 1) for part in scratch)  # [n, query heads, dim]
        weights = (torch.einsum("hd,nhd->hn", step.q[row].double(), k) * 0.125).softmax(-1)
        assert torch.allclose(torch.einsum("hn,nhd->hd", weights, v), exact[row], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "dtype", "why"),
    [
        ((1, 24, 256), torch.bfloat16, None),
        ((1, 4, 96), torch.bfloat16, "heads of 96 channels"),
        ((1, 5, 64), torch.float32, "5 query heads for 2 KV heads"),
        ((1, 80, 64), torch.float32, "80 query heads for 2 KV heads"),
        ((1, 4, 64), torch.float64, "queries of torch.float64"),
    ],
)
def test_what_the_kernels_do_not_take_has_a_reason(
    shape: tuple[int, ...], dtype: torch.dtype, why: str | None
) -> None:
    rows = StoredRows(torch.zeros(1, 2, shape[2]), None, None)
    assert kv_attention.missing(torch.empty(shape, dtype=dtype), rows) == why


@pytest.mark.parametrize("topk", [1, 63, 64, 65, 2051, 20_000])
@pytest.mark.parametrize("config", [AttentionConfig(), AttentionConfig(block=32), AttentionConfig(splits=5)])
def test_splits_cover_the_selection_once(topk: int, config: AttentionConfig) -> None:
    each, splits = kv_attention.split(topk, config)
    assert 1 <= splits <= (config.splits or 128)
    assert (splits - 1) * each * config.block < topk <= splits * each * config.block


def test_a_step_of_the_real_model_fills_a_gpu() -> None:
    assert kv_attention.split(2051, AttentionConfig()) == (1, 33)  # with two KV heads, 66 programs
    assert kv_attention.split(2051, AttentionConfig(block=32)) == (1, 65)


@pytest.mark.parametrize("capability", [89, 90, 120])
def test_the_kernels_compile_and_fit_the_shared_memory_of_a_consumer_card(capability: int) -> None:
    """Compiled here, without a GPU, at the real model's shape; a consumer card gives a program 99 KiB."""
    done = subprocess.run(
        [sys.executable, attention_compile.__file__, str(capability)],
        env=child_env({}, drop=("TRITON_INTERPRET",)),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    shared = json.loads(done.stdout)
    assert set(shared) == {"int8", "int4", TIERED, "bf16", "fp8", "merge"}
    assert max(shared.values()) < 50 * 1024, shared
