"""The device arena: fixed addresses, memory that comes and goes in chunks."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.residency.arena import Arena
from q38.residency.driver import CudaError, OutOfMemory
from tests.residency.fake_driver import FakeDriver

CHUNK = 128


@given(sizes=st.lists(st.integers(0, 40 * CHUNK), max_size=12))
def test_backed_memory_exceeds_the_request_by_less_than_a_chunk_and_the_base_never_moves(
    sizes: list[int],
) -> None:
    driver = FakeDriver()
    arena = Arena(driver, 40 * CHUNK, chunk=CHUNK)
    base = arena.base
    for nbytes in sizes:
        arena.grow_to(nbytes)
        arena.shrink_to(nbytes)
        assert 0 <= arena.backed - nbytes < CHUNK
        assert arena.backed == arena.committed == driver.committed
        assert arena.base == base
    arena.close()
    assert not driver.leaks()


def test_chunks_are_rounded_up_to_the_granularity() -> None:
    arena = Arena(FakeDriver(granularity=64), 1000, chunk=100)
    assert arena.chunk == 128 and arena.capacity == 1024


def test_memory_keeps_its_content_while_the_arena_grows_behind_it() -> None:
    arena = Arena(FakeDriver(), 1024, chunk=CHUNK)
    arena.grow_to(100)
    arena.view(0, 100).fill_(7)
    arena.grow_to(1000)
    assert arena.view(0, 100).eq(7).all()
    arena.shrink_to(128)
    assert arena.view(0, 100).eq(7).all()


def test_a_view_beyond_the_backed_memory_is_refused() -> None:
    arena = Arena(FakeDriver(), 1024, chunk=CHUNK)
    arena.grow_to(200)
    arena.view(128, 128)
    with pytest.raises(ValueError, match="256 backed"):
        arena.view(129, 128)
    with pytest.raises(ValueError, match="256 backed"):
        arena.view(-1, 4)


def test_growing_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="1025 bytes asked of an arena of 1024"):
        Arena(FakeDriver(), 1024, chunk=CHUNK).grow_to(1025)


@given(call=st.integers(0, 40), before=st.integers(0, 6), after=st.integers(0, 12))
def test_out_of_memory_at_any_call_leaves_the_arena_as_it_was(call: int, before: int, after: int) -> None:
    driver = FakeDriver()
    arena = Arena(driver, 12 * CHUNK, chunk=CHUNK)
    arena.grow_to(before * CHUNK)
    driver.fail_at = call
    try:
        arena.grow_to(after * CHUNK)
    except OutOfMemory:
        assert arena.backed == arena.committed == driver.committed == before * CHUNK
    driver.fail_at = None
    arena.grow_to(after * CHUNK)
    assert arena.backed == max(before, after) * CHUNK


@given(
    calls=st.lists(st.integers(0, 8), min_size=1, max_size=6),
    sizes=st.lists(st.integers(0, 8), min_size=6, max_size=6),
)
def test_after_any_series_of_failures_nothing_is_lost_and_the_arena_works(
    calls: list[int], sizes: list[int]
) -> None:
    driver = FakeDriver()
    arena = Arena(driver, 8 * CHUNK, chunk=CHUNK)
    for call, size in zip(calls, sizes, strict=False):
        driver.fail_at = call
        with suppress(CudaError):
            (arena.grow_to if size % 2 else arena.shrink_to)(size * CHUNK)
        driver.fail_at = None
        assert arena.committed == driver.committed >= arena.backed
        if arena.backed:
            arena.view(0, arena.backed)
    arena.grow_to(8 * CHUNK)
    arena.view(0, 8 * CHUNK).fill_(1)
    arena.close()
    assert not driver.leaks()


class TwiceFailing(FakeDriver):
    """After the first out-of-memory, unmapping fails as well: the roll-back cannot finish."""

    broken = False

    def set_access(self, address: int, nbytes: int) -> None:
        if self.broken:
            raise OutOfMemory("set_access")
        super().set_access(address, nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        if self.broken:
            raise CudaError("unmap", 1, "injected")
        super().unmap(address, nbytes)


def test_a_roll_back_that_fails_too_is_accounted_for_and_finished_later() -> None:
    driver = TwiceFailing()
    arena = Arena(driver, 8 * CHUNK, chunk=CHUNK)
    arena.grow_to(2 * CHUNK)
    driver.broken = True
    with pytest.raises(OutOfMemory):
        arena.grow_to(5 * CHUNK)
    assert arena.backed == 2 * CHUNK and arena.committed == driver.committed == 5 * CHUNK
    driver.broken = False
    arena.grow_to(4 * CHUNK)
    arena.view(0, 4 * CHUNK).fill_(1)
    arena.shrink_to(4 * CHUNK)
    assert driver.committed == 4 * CHUNK
