"""Residency on a real GPU: memory really returned, graphs that replay across moves, loading into rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from q38.base.units import GIB, MIB
from q38.residency.adapt import Adapter, AdaptSettings
from q38.residency.arena import Arena
from q38.residency.cache import ExpertCache, open_cache
from q38.residency.driver import Cuda, OutOfMemory
from q38.residency.loader import load_rows
from q38.residency.pool import HostLimits
from q38.sglang_ext.traffic import Traffic
from tests.residency.packed import expected_row, make_checkpoint

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
LAYERS, EXPERTS, ROW = 4, 64, 1_000_064  # bytes; no multiple of a page
LIMITS = HostLimits(64 * GIB, None)
KERNELS = Path(__file__).resolve().parents[2] / "benchmarks" / "residency_check.cu"


@pytest.fixture
def driver() -> Iterator[Cuda]:
    torch.cuda.init()
    driver = Cuda()
    yield driver
    torch.cuda.synchronize()
    driver.close()


def random_rows(cache: ExpertCache) -> torch.Tensor:
    """Fill every row with random bytes and publish; returns the checksum of each, int64."""
    store = cache.store
    rows = np.random.default_rng(0).integers(0, 2**63, (store.rows, ROW // 8), np.uint64)
    for row, place in enumerate(store.place.tolist()):
        if place < 0:
            store.pool.row(-1 - place)[:] = rows[row].view(np.uint8)
        else:
            store.arena.view(place * ROW, ROW).copy_(torch.from_numpy(rows[row].view(np.uint8)))
    torch.cuda.synchronize()
    store.publish()
    sums = (rows * (2 * np.arange(ROW // 8, dtype=np.uint64) + 1)).sum(axis=1, dtype=np.uint64)
    return torch.from_numpy(sums.view(np.int64)).cuda()


def open_small(driver: Cuda, stream: torch.cuda.Stream, **options: int) -> ExpertCache:
    mask = np.zeros((LAYERS, EXPERTS), bool)
    mask[:, :16] = True
    heat = np.random.default_rng(1).random(mask.shape)
    return open_cache(driver, ROW, mask, heat, stream=stream.cuda_stream, fewest=0, limits=LIMITS, **options)


def test_memory_goes_back_to_the_driver_and_comes_again(driver: Cuda) -> None:
    assert bool(torch.zeros(4096, device="cuda").fill_(7).eq(7).all())  # loads the kernels used below
    arena = Arena(driver, 2 * GIB)
    free = driver.memory()[0]
    arena.grow_to(1 * GIB)
    assert free - driver.memory()[0] == pytest.approx(GIB, abs=8 * MIB)
    arena.view(0, GIB).fill_(7)
    torch.cuda.synchronize()
    arena.shrink_to(256 * MIB)
    assert free - driver.memory()[0] == pytest.approx(256 * MIB, abs=8 * MIB)
    for start in (0, 256 * MIB - 4096):  # small, so that torch's allocator takes nothing new
        assert bool(arena.view(start, 4096).eq(7).all())
    torch.cuda.synchronize()
    arena.close()
    assert driver.memory()[0] == pytest.approx(free, abs=8 * MIB)


def test_out_of_memory_is_reported_as_such_and_leaves_nothing(driver: Cuda) -> None:
    arena = Arena(driver, 1024 * GIB, chunk=512 * GIB)
    free = driver.memory()[0]
    with pytest.raises(OutOfMemory, match="cuMemCreate failed: out of memory"):
        arena.grow_to(1)
    assert arena.committed == 0 and driver.memory()[0] == pytest.approx(free, abs=8 * MIB)
    arena.close()


def test_a_graph_that_replays_across_moves_always_reads_whole_rows(driver: Cuda) -> None:
    from q38.kernels.nvrtc import load_kernels

    stream = torch.cuda.Stream()
    cache = open_small(driver, stream)
    sums, table = random_rows(cache), cache.store.table.tensor()
    counters = torch.zeros(3, dtype=torch.int64, device="cuda")
    check, step = load_kernels(KERNELS, {}, ("check_rows", "next_step"))

    def launch() -> None:
        current = torch.cuda.current_stream().cuda_stream
        check.launch((200, 1), 256, [table, sums, counters, LAYERS * EXPERTS, ROW // 8, 0], stream=current)
        step.launch((1, 1), 1, [counters], stream=current)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        launch()
        with pytest.raises(Exception, match="a CUDA graph is being captured"):
            cache.grow(1)
    rng = np.random.default_rng(2)
    for i in range(40):
        with torch.cuda.stream(stream):
            graph.replay()
        cache.set_heat(rng.random((LAYERS, EXPERTS)))
        if i % 2:
            cache.set_budgets(rng.integers(0, EXPERTS // 2, LAYERS))
        else:
            cache.begin_swaps(
                np.flatnonzero(~cache.store.on_device)[:8], np.flatnonzero(cache.store.on_device)[:8]
            )
            cache.poll()
    with torch.cuda.stream(stream):
        check.launch(
            (LAYERS * EXPERTS, 1),
            256,
            [table, sums, counters, LAYERS * EXPERTS, ROW // 8, 1],
            stream=stream.cuda_stream,
        )
    stream.synchronize()
    wrong, read, _ = counters.tolist()
    assert wrong == 0 and read > 40 * 200
    cache.close()


def test_rows_are_pinned_exactly_and_the_device_reads_them(driver: Cuda) -> None:
    stream = torch.cuda.Stream()
    cache = open_small(driver, stream)
    pool = cache.store.pool
    assert pool.pinned - pool.requested < 4096
    pool.row(0)[:] = 5
    target = driver.allocate(ROW)
    driver.copy(np.array([target]), np.array([pool.device_address]), ROW, stream.cuda_stream)
    driver.synchronize(stream.cuda_stream)
    assert bool(driver.tensor(target, ROW).eq(5).all())
    driver.deallocate(target)
    cache.close()


def test_the_loader_fills_rows_on_both_sides(driver: Cuda, tmp_path: Path) -> None:
    checkpoint, layout, tensors = make_checkpoint(tmp_path)
    mask = np.zeros((4, 4), bool)
    mask[:, :2] = True
    stream = torch.cuda.Stream()
    cache = open_cache(
        driver, layout.row_bytes, mask, np.ones((4, 4)), stream=stream.cuda_stream, limits=LIMITS
    )
    load_rows(checkpoint, layout, cache.store, unit=layout.row_bytes, readers=4)
    addresses = cache.store.table.tensor().cpu()
    for layer, expert in np.ndindex(4, 4):
        host = torch.empty(layout.row_bytes, dtype=torch.uint8)
        row = driver.allocate(layout.row_bytes)
        driver.copy(
            np.array([row]), np.array([int(addresses[layer, expert])]), layout.row_bytes, stream.cuda_stream
        )
        driver.synchronize(stream.cuda_stream)
        host.copy_(driver.tensor(row, layout.row_bytes))
        driver.deallocate(row)
        assert torch.equal(host, expected_row(tensors, layout, layer, expert)), (layer, expert)
    cache.close()


def test_the_adapter_counts_in_a_captured_graph_and_brings_hot_rows_in(driver: Cuda) -> None:
    stream = torch.cuda.Stream()
    cache = open_small(driver, stream, scratch=3 * 2 * 4 * LAYERS * EXPERTS)
    random_rows(cache)
    settings = AdaptSettings(swaps=8, interval=4, half_life=100.0, prior_tokens=1.0)
    traffic = Traffic(cache, ROW, torch.device("cuda"))
    adapter = Adapter(cache, np.ones((LAYERS, EXPERTS)), traffic, top_k=4, settings=settings)
    ids = torch.tensor([[60, 61, 62, 63]], dtype=torch.int32, device="cuda")
    traffic.add("decode", 0, ids)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for layer in range(LAYERS):
            traffic.add("decode", layer, ids)
    for _ in range(200):
        with torch.cuda.stream(stream):
            graph.replay()
        adapter.step()
        stream.synchronize()
    traffic.collect()
    assert traffic.counts[1].tolist() == [0] * 60 + [200] * 4
    assert cache.resident[:, 60:].all()
    cache.close()
