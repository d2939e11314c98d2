"""Quantized KV pools on a real GPU: the CPU's bits, memory that the driver really gets back, graphs across remaps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from q38.base.units import GIB, MIB
from q38.kernels.kv_select import selected_slots
from q38.kvcache.addressing import Paging
from q38.kvcache.backing import Backing, KvRefused, map_memory
from q38.kvcache.layout import ROWS, SIDES, TIERED, KvLayout
from q38.kvcache.pool import KvPool, gather_many
from q38.residency.driver import Cuda
from q38.sglang_ext.kv_lender import ExpertLender

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
HEADS, DIM, LAYERS, PAGE = 2, 256, 12, 64
EVERY = pytest.mark.parametrize("name", list(ROWS))


def layout(name: str, *, layers: int = LAYERS, ring: int = 8192) -> KvLayout:
    return KvLayout(name, layers, HEADS, DIM, ring if name == TIERED else 0)


def hard_rows(n: int, seed: int = 0) -> torch.Tensor:
    """Ordinary, tied, zero, tiny and huge rows: bf16 [n, heads, dim]."""
    rows = torch.randn(n, HEADS, DIM, generator=torch.Generator().manual_seed(seed)) * 3
    rows[0, 0, :64] = 0
    rows[1 % n] *= 1e30
    rows[2 % n] *= 1e-9
    rows[3 % n] = torch.arange(DIM) * 0.5 - 60
    return rows.to(torch.bfloat16)


@EVERY
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_pool_on_the_gpu_holds_and_returns_the_bits_of_one_on_the_cpu(
    name: str, dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    shape = layout(name, layers=2, ring=256)
    here, there = KvPool(shape, 4096), KvPool(shape, 4096, device="cuda")
    k, v = hard_rows(200), hard_rows(200, 1)
    wide = torch.stack([k, v], 1).flatten(1)  # rows of a fused projection: not contiguous
    # Places of the ring are distinct within a step, so that which slot owns them is decided.
    for start in (1000, 1100, 3900 - 256 * 8):
        slots = torch.arange(start, start + 200, dtype=slot_dtype)
        slots[7] = -1
        here.write(1, slots, k, v)
        fused = wide.cuda().view(200, 2, HEADS, DIM)
        there.write(1, slots.cuda(), fused[:, 0], fused[:, 1])
    wanted = torch.randperm(4096, generator=torch.Generator().manual_seed(3)).to(slot_dtype)
    wanted[::9] = -1
    for side in SIDES:
        a, b = here.rows[1][side], there.rows[1][side]
        assert torch.equal(a.payload.view(torch.uint8), b.payload.cpu().view(torch.uint8))
        if a.scales is not None:
            assert torch.equal(a.scales, b.scales.cpu())  # type: ignore[union-attr]
        if a.tiers is not None:
            assert all(torch.equal(x, y.cpu()) for x, y in zip(a.tiers, b.tiers, strict=True))  # type: ignore[arg-type]
        out = torch.full((4096, HEADS, DIM), 7.0, dtype=dtype)
        found = there.gather(1, side, wanted.cuda(), out.cuda())
        assert torch.equal(here.gather(1, side, wanted, out), found.cpu())


def test_slots_that_meet_in_one_launch_agree_on_one_owner_for_keys_and_values() -> None:
    shape = layout(TIERED, layers=1, ring=64)
    int8, int4 = (KvPool(layout(n, layers=1), 8192, device="cuda") for n in ("int8", "int4"))
    for attempt in range(20):
        pool = KvPool(shape, 8192, device="cuda")
        slots = torch.arange(attempt, attempt + 64 * 100, 100, device="cuda")  # 64 rows, many to a place
        k, v = hard_rows(64, attempt).cuda(), hard_rows(64, attempt + 50).cuda()
        for each in (pool, int8, int4):
            each.write(0, slots, k, v)
        got, fine, coarse = (gather_many(p, 0, slots, torch.float32) for p in (pool, int8, int4))
        owner = pool.rows[0]["k"].tiers.owner  # type: ignore[union-attr]
        hot = owner[slots % 64] == slots
        assert bool(hot.any()) and len(slots[hot] % 64) == len((slots[hot] % 64).unique())
        assert set((slots % 64).tolist()) == set((slots[hot] % 64).tolist())
        for side in (0, 1):
            assert torch.equal(got[side][hot], fine[side][hot])
            assert torch.equal(got[side][~hot], coarse[side][~hot])


def test_more_rows_than_the_ring_go_in_by_pieces() -> None:
    here, there = (KvPool(layout(TIERED, layers=1, ring=64), 1024, device=d) for d in ("cpu", "cuda"))
    slots, k, v = torch.arange(300) + 100, hard_rows(300), hard_rows(300, 1)
    here.write(0, slots, k, v)
    there.write(0, slots.cuda(), k.cuda(), v.cuda())
    for a, b in zip(
        gather_many(here, 0, slots, torch.float32),
        gather_many(there, 0, slots.cuda(), torch.float32),
        strict=True,
    ):
        assert torch.equal(a, b.cpu())


@EVERY
@pytest.mark.parametrize("room", [0, 24])  # runs one after the other, runs of one stride
def test_the_rows_that_queries_select_reach_the_scratch_in_a_captured_step(name: str, room: int) -> None:
    batch, topk, context = 3, 40, 600
    shape, random = layout(name, layers=1, ring=256), torch.Generator().manual_seed(5)
    here, there = KvPool(shape, 1024), KvPool(shape, 1024, device="cuda")
    k, v = hard_rows(context), hard_rows(context, 1)
    slots = torch.randperm(1024, generator=random)[:context]
    for start in range(0, context, 200):  # places of the ring change their owners meanwhile
        part = slice(start, start + 200)
        if shape.ring:  # one slot a place, so that the owner is decided
            slots[part] = torch.arange(start, start + 200)
        here.write(0, slots[part], k[part], v[part])
        there.write(0, slots[part].cuda(), k[part].cuda(), v[part].cuda())
    table = torch.zeros(4, context + 8, dtype=torch.int32)
    table[2, :context], table[0, :context] = slots, slots.flip(0)
    requests, lengths = torch.tensor([2, 0, 1]), torch.tensor([context, 300, 1], dtype=torch.int32)
    indices = torch.full((batch, topk), -1, dtype=torch.int32)
    indices[0] = torch.randperm(context, generator=random)[:topk]
    indices[1, :33] = torch.randperm(300, generator=random)[:33]
    indices[2, 0] = 0  # a padded query: one row, of slot 0
    columns = topk + room
    starts = torch.tensor(
        [0, topk, topk + 33, topk + 34] if not room else [i * columns for i in range(4)]
    ).int()
    arguments = (table[:, :context], requests, indices, lengths, starts)
    wanted = selected_slots(*arguments, batch, columns)
    assert int((wanted >= 0).sum()) == topk + 33 + 1
    scratch = torch.full((batch * columns, HEADS, DIM), 7.0, dtype=torch.bfloat16)
    out, on = scratch.cuda(), [tensor.cuda() for tensor in arguments]
    on[0] = table.cuda()[:, :context]  # rows of a wider table

    def step() -> None:
        there.gather(0, "v", selected_slots(*on, batch, columns), out)

    if shape.rows is None:  # on a GPU fp8 is SGLang's own
        step()
    else:
        step()  # compiles
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        out.fill_(7)
        graph.replay()
    assert torch.equal(out.cpu(), here.gather(0, "v", wanted, scratch))


@pytest.fixture
def driver() -> Iterator[Cuda]:
    torch.cuda.init()
    driver = Cuda()
    yield driver
    torch.cuda.synchronize()
    driver.close()


def free_memory(driver: Cuda) -> int:
    """Bytes that the driver has, once torch keeps nothing for itself."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return driver.memory()[0]


@EVERY
def test_the_whole_context_is_addressed_and_only_pages_in_use_take_memory(driver: Cuda, name: str) -> None:
    shape, paging = layout(name), Paging(262_144, PAGE)
    written_and_read(
        KvPool(layout(name, layers=1), 1024, device="cuda"), torch.arange(1000), 0
    )  # loads the kernels
    start = free_memory(driver)
    backing = Backing(driver, shape, paging)
    pool = KvPool(shape, paging.slots, device="cuda", memory=map_memory(backing, driver))
    pool.clear_first(PAGE)
    idle = free_memory(driver)
    assert start - idle < shape.ring_bytes + len(shape.parts()) * 2 * MIB + 32 * MIB
    pages = torch.randperm(paging.pages, generator=torch.Generator().manual_seed(0))[:64] + 1
    taken = backing.ensure(pages.tolist())
    assert abs(idle - free_memory(driver) - taken) < 8 * MIB
    slots = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()
    before = written_and_read(pool, slots, LAYERS - 1)
    backing.ensure(range(1, 513))  # 32,768 tokens more around them
    free = [p for p in range(1, 513) if p not in set(pages.tolist())]
    torch.cuda.synchronize()
    assert backing.trim(free) > 0
    after = [rows.cpu() for rows in gather_many(pool, LAYERS - 1, slots.cuda(), torch.bfloat16)]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    torch.cuda.synchronize()
    backing.trim(pages.tolist())
    assert abs(free_memory(driver) - idle) < 8 * MIB
    del pool
    backing.close()
    assert abs(free_memory(driver) - start) < 8 * MIB


def written_and_read(pool: KvPool, slots: torch.Tensor, layer: int) -> list[torch.Tensor]:
    """Keys and values of the slots on the CPU, bf16, after rows went in."""
    k, v = (hard_rows(len(slots), seed).cuda() for seed in (0, 1))
    pool.write(layer, slots.cuda(), k, v)
    return [rows.cpu() for rows in gather_many(pool, layer, slots.cuda(), torch.bfloat16)]


@pytest.mark.parametrize("name", ["int8", TIERED, "int4"])  # fp8 is SGLang's own there
def test_a_captured_step_replays_after_its_pages_were_given_back_and_mapped_again(
    driver: Cuda, name: str
) -> None:
    paging = Paging(65_536, PAGE)
    backing = Backing(driver, layout(name, layers=1), paging)
    pool = KvPool(layout(name, layers=1), paging.slots, device="cuda", memory=map_memory(backing, driver))
    pool.clear_first(PAGE)
    slots, k, v = torch.zeros(8, dtype=torch.int64, device="cuda"), *hard_rows(16).cuda().split(8)
    out = torch.zeros(8, HEADS, DIM, dtype=torch.bfloat16, device="cuda")
    pool.write(0, slots, k, v)  # compiles
    pool.gather(0, "v", slots, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pool.write(0, slots, k, v)
        pool.gather(0, "v", slots, out)
    for first in (100, 900, 100):
        backing.ensure([first])
        slots.copy_(torch.arange(8) + first * PAGE)
        v.copy_(hard_rows(8, first))
        graph.replay()
        torch.cuda.synchronize()
        expected = KvPool(layout(name, layers=1), 8)
        expected.write(0, torch.arange(8), k.cpu(), v.cpu())
        best = expected.gather(0, "v", torch.arange(8), torch.empty(8, HEADS, DIM, dtype=torch.bfloat16))
        assert torch.equal(out.cpu(), best)
        backing.trim([first])
    backing.close()


def test_memory_that_torch_keeps_is_counted_and_goes_back_when_it_is_asked_for(driver: Cuda) -> None:
    start, lender = free_memory(driver), ExpertLender(0)
    used = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ = used + 1  # takes memory that only this graph may use
    before = lender.kept()
    step = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
    assert lender.kept() == before
    del step
    assert lender.kept() == before + 512 * MIB
    assert start - driver.memory()[0] > 512 * MIB
    lender.give_back()
    assert lender.kept() == 0
    assert start - driver.memory()[0] < 256 * MIB
    graph.reset()


def test_more_than_the_gpu_has_is_refused_and_costs_nothing(driver: Cuda) -> None:
    hog = torch.empty(max(free_memory(driver) - 3 * GIB, 1), dtype=torch.uint8, device="cuda")
    paging = Paging(262_144, PAGE)
    with_headroom = Backing(driver, layout("int8"), paging, headroom=GIB)
    before = driver.memory()[0]
    with pytest.raises(KvRefused, match="would fit") as refused:
        with_headroom.ensure(range(1, paging.pages + 1))  # 3.1 GiB
    assert 0 < refused.value.fits < 262_144
    assert abs(driver.memory()[0] - before) < 8 * MIB
    with_headroom.ensure(range(1, 1 + int(refused.value.fits * 0.9) // PAGE))
    with_headroom.close()
    del hog
    torch.cuda.empty_cache()
