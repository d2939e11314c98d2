"""Attention from packed rows on a real GPU at the real model's shape: every format, captured steps, padded rows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from q38.kernels.kv_attention import AttentionConfig, StoredRows, decode_attention
from q38.kernels.kv_attention_reference import attention_reference
from q38.kernels.kv_select import selected_slots
from q38.kvcache.layout import TIERED, KvLayout
from q38.kvcache.pool import KvPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
HEADS, QUERIES, DIM, TOPK, CONTEXT, RING = 2, 24, 256, 2051, 262_144, 8192
SCALE = DIM**-0.5
PACKED = ("int8", TIERED, "int4")
EVERY = pytest.mark.parametrize("name", [*PACKED, "bf16", "fp8"])


class Step(NamedTuple):
    """Buffers of a step, as a captured graph keeps them."""

    q: torch.Tensor
    table: torch.Tensor
    requests: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor


def stored(name: str, slots: int = CONTEXT, seed: int = 0) -> tuple[StoredRows, StoredRows]:
    """Random keys and values in every slot; the ring has the last RING of them in a random order of slots."""
    torch.manual_seed(seed)
    if name in ("bf16", "fp8"):
        plain = torch.randn(2, slots, HEADS, DIM, device="cuda")
        plain = plain.to(torch.bfloat16 if name == "bf16" else torch.float8_e4m3fn)
        return StoredRows(plain[0], None, None), StoredRows(plain[1], None, None)
    pool = KvPool(KvLayout(name, 1, HEADS, DIM, RING if name == TIERED else 0), slots, device="cuda")
    for part in torch.randperm(slots, device="cuda").split(4096):
        k, v = torch.randn(2, len(part), HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        pool.write(0, part, k, v)
    made = []
    for side in ("k", "v"):
        rows = pool.rows[0][side]  # type: ignore[index]
        made.append(StoredRows(rows.payload, rows.scales, pool.layout.rows, rows.tiers))
    return made[0], made[1]


def step(rows: int, lengths: list[int], *, slots: int = CONTEXT, topk: int = TOPK, seed: int = 0) -> Step:
    """Queries of `rows` requests; each selects distinct positions below its length, -1 behind them."""
    generator = torch.Generator().manual_seed(seed)
    indices = torch.full((rows, topk), -1, dtype=torch.int32)
    for row, length in enumerate(lengths):
        count = min(topk, length)
        indices[row, :count] = torch.randperm(length, generator=generator)[:count].int()
    order = torch.randperm(slots, generator=generator).int()
    table = torch.stack([order.roll(17 * request) for request in range(rows + 1)])
    return Step(
        torch.randn(rows, QUERIES, DIM, generator=generator).to("cuda", torch.bfloat16),
        table.cuda(),
        torch.arange(rows, dtype=torch.int32, device="cuda") + 1,
        indices.cuda(),
        torch.tensor(lengths, dtype=torch.int32, device="cuda"),
    )


def relative_error(
    found: torch.Tensor, rows: tuple[StoredRows, StoredRows], of: Step, scale: float = SCALE
) -> float:
    exact = attention_reference(of.q, *rows, of.table, of.requests, of.indices, of.lengths, scale)
    assert bool(found.isfinite().all())
    return float((found.double() - exact).norm() / exact.norm())


def attend(
    rows: tuple[StoredRows, StoredRows], of: Step, config: AttentionConfig | None = None
) -> torch.Tensor:
    return decode_attention(of.q, *rows, of.table, of.requests, of.indices, of.lengths, SCALE, config=config)


@EVERY
@pytest.mark.parametrize("rows", [1, 4, 16])
def test_every_format_attends_as_the_reference_does_at_the_real_shape(name: str, rows: int) -> None:
    pool, of = stored(name), step(rows, [CONTEXT - 37 * i for i in range(rows)])
    for config in (None, AttentionConfig(block=32, warps=4), AttentionConfig(splits=8)):
        assert relative_error(attend(pool, of, config), pool, of) < 5e-3


@pytest.mark.parametrize("name", PACKED)
def test_it_agrees_with_the_gather_and_a_softmax_after_it(name: str) -> None:
    """Today's path: rows to a bf16 scratch by q38's kernel, then attention in bf16 by torch."""
    layout = KvLayout(name, 1, HEADS, DIM, RING if name == TIERED else 0)
    pool = KvPool(layout, 20_000, device="cuda")
    torch.manual_seed(1)
    for part in torch.randperm(20_000, device="cuda").split(4096):
        pool.write(0, part, *torch.randn(2, len(part), HEADS, DIM, device="cuda", dtype=torch.bfloat16))
    of = step(2, [20_000, 15_000], slots=20_000)
    starts = torch.tensor([0, TOPK, 2 * TOPK], dtype=torch.int32, device="cuda")
    slots = selected_slots(of.table, of.requests, of.indices, of.lengths, starts, 2, TOPK)
    scratch = torch.zeros(2, 2 * TOPK, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    for side, out in zip(("k", "v"), scratch, strict=True):
        pool.gather(0, side, slots, out)  # type: ignore[arg-type]
    k, v = scratch.view(2, 2, TOPK, HEADS, DIM).transpose(2, 3)  # [rows, heads, n, dim]
    theirs = torch.nn.functional.scaled_dot_product_attention(
        of.q[:, :, None], k.repeat_interleave(QUERIES // HEADS, 1), v.repeat_interleave(QUERIES // HEADS, 1), scale=SCALE
    )[:, :, 0]  # fmt: skip
    both = [pool.rows[0][side] for side in ("k", "v")]  # type: ignore[index]
    rows = tuple(StoredRows(r.payload, r.scales, layout.rows, r.tiers) for r in both)
    ours = attend(rows, of)  # type: ignore[arg-type]
    error = relative_error(ours, rows, of)  # type: ignore[arg-type]
    assert error < 5e-3
    assert error < 2 * relative_error(theirs, rows, of)  # type: ignore[arg-type]
    assert float((ours.float() - theirs.float()).norm() / theirs.float().norm()) < 8e-3


@EVERY
def test_a_captured_step_follows_its_lengths_selections_and_requests(name: str) -> None:
    slots = 50_000
    pool, of = stored(name, slots), step(4, [slots, 100, 1, 1], slots=slots)
    of.table[0] = 0
    attend(pool, of)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend(pool, of)
    for seed, lengths in enumerate(
        ([slots, 100, 1, 1], [3, slots - 9, 700, 1], [1, 1, 1, 1], [64, 65, 2051, 0])
    ):
        new = step(4, lengths, slots=slots, seed=seed + 1)
        of.q.copy_(new.q)
        of.indices.copy_(new.indices)
        of.lengths.copy_(new.lengths)
        of.requests.copy_(new.requests.flip(0))
        of.requests[3] = 0  # a padded row: request 0, slot 0
        graph.replay()
        torch.cuda.synchronize()
        assert relative_error(out, pool, of) < 5e-3
        assert torch.equal(out, attend(pool, of))  # the same bits as outside of the graph
        assert bool(out[3].any()) == (lengths[3] > 0)


@EVERY
def test_positions_that_do_not_count_may_stand_anywhere(name: str) -> None:
    slots = 20_000
    pool, of = stored(name, slots), step(3, [slots, slots, slots], slots=slots)
    generator = torch.Generator().manual_seed(3)
    of.indices[torch.rand(of.indices.shape, generator=generator).cuda() < 0.5] = -1
    of.indices[1, ::3] = slots + 7
    of.indices[2] = -1
    out = attend(pool, of)
    assert relative_error(out, pool, of) < 5e-3
    assert not out[2].any()


@pytest.mark.parametrize("name", PACKED)
def test_slots_beyond_32_bits_of_elements_are_read(name: str) -> None:
    far = 2**32 // (HEADS * DIM) + 64  # beyond 2**31 bytes of INT4 codes too
    layout = KvLayout(name, 1, HEADS, DIM, RING if name == TIERED else 0)
    pool = KvPool(layout, far + 64, device="cuda")
    slots = torch.arange(64, device="cuda") + far
    k, v = torch.randn(2, 64, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
    pool.write(0, slots, k, v)
    if pool.rows[0]["k"].tiers is not None:
        pool.rows[0]["k"].tiers.owner.fill_(-1)  # only the INT4 rows are far away
    both = [pool.rows[0][side] for side in ("k", "v")]  # type: ignore[index]
    rows = tuple(StoredRows(r.payload, r.scales, layout.rows, r.tiers) for r in both)
    of = step(1, [64], slots=64, topk=64)
    of.table.copy_(slots.int().expand(2, -1))
    assert relative_error(attend(rows, of), rows, of) < 5e-3  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("queries", "dim"), [(8, 64), (2, 128), (32, 256)])
def test_other_shapes_and_dtypes(dtype: torch.dtype, queries: int, dim: int) -> None:
    layout = KvLayout(TIERED, 1, HEADS, dim, 256)
    pool = KvPool(layout, 4096, device="cuda")
    pool.write(0, torch.arange(4096, device="cuda"), *torch.randn(2, 4096, HEADS, dim, device="cuda"))
    both = [pool.rows[0][side] for side in ("k", "v")]  # type: ignore[index]
    rows = tuple(StoredRows(r.payload, r.scales, layout.rows, r.tiers) for r in both)
    of = step(3, [4096, 900, 1], slots=4096, topk=500)
    of = of._replace(q=torch.randn(3, queries, dim, device="cuda", dtype=dtype))
    out = decode_attention(of.q, *rows, of.table, of.requests, of.indices, of.lengths, 0.125)  # type: ignore[misc]
    assert relative_error(out, rows, of, 0.125) < (2e-3 if dtype == torch.float16 else 5e-5)  # type: ignore[arg-type]
