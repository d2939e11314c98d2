"""Exact pinned memory: sizes, refusals before mapping, slots."""

from __future__ import annotations

import gc
import mmap
import resource
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import ResourceError
from q38.base.progress import SILENT
from q38.base.units import GIB, MIB
from q38.residency import pool as pool_module
from q38.residency.driver import OutOfMemory
from q38.residency.pool import HostLimits, HostPool, Slots
from tests.residency.fake_driver import FakeDriver

PLENTY = HostLimits(2**40, None)


@pytest.fixture(autouse=True)
def limits_stay() -> Iterator[None]:
    """The trial under a limit of zero puts the limit back."""
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield
    assert resource.getrlimit(resource.RLIMIT_MEMLOCK) == before


@pytest.fixture
def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any mapping of host memory larger than a page fails the test."""
    real = mmap.mmap

    def refuse(fd: int, length: int, *arguments: object, **options: object) -> mmap.mmap:
        assert length <= mmap.PAGESIZE, "memory was mapped"
        return real(fd, length, *arguments, **options)

    monkeypatch.setattr(pool_module.mmap, "mmap", refuse)


@given(rows=st.integers(0, 50), row_bytes=st.integers(1, 5000), scratch=st.integers(0, 5000))
def test_pinned_memory_exceeds_what_was_requested_by_less_than_a_page(
    rows: int, row_bytes: int, scratch: int
) -> None:
    driver = FakeDriver()
    pool = HostPool(driver, row_bytes, rows, scratch=scratch, limits=PLENTY, threads=1)
    assert pool.requested == rows * row_bytes + scratch
    assert 0 <= pool.pinned - max(pool.requested, 1) < mmap.PAGESIZE
    assert list(driver.registered.values()) == [pool.pinned]
    pool.close()
    assert not driver.leaks()


def test_rows_lie_back_to_back_and_scratch_behind_them() -> None:
    pool = HostPool(FakeDriver(), 24, 3, scratch=16, limits=PLENTY, threads=1)
    for slot in range(3):
        pool.row(slot)[:] = slot + 1
    scratch, address = pool.take_scratch(16)
    scratch[:] = 9
    assert pool.memory[:88].tolist() == [1] * 24 + [2] * 24 + [3] * 24 + [9] * 16
    assert address == pool.device_address + 72
    with pytest.raises(ResourceError, match="1 bytes of scratch needed, 0 left"):
        pool.take_scratch(1)


def test_too_little_available_memory_is_refused_before_mapping_with_the_shortfall(no_mapping: None) -> None:
    with pytest.raises(
        ResourceError, match=r"8\.0 MiB to pin and 1\.0 GiB to keep free, 1\.0 GiB available: 3\.0 MiB short"
    ):
        HostPool(FakeDriver(), MIB, 8, limits=HostLimits(GIB + 5 * MIB, None))


def test_a_memlock_limit_that_counts_is_refused_before_mapping_with_the_shortfall(no_mapping: None) -> None:
    driver = FakeDriver()
    driver.counts_memlock = True
    with pytest.raises(
        ResourceError,
        match=r"RLIMIT_MEMLOCK: 8\.0 MiB to pin, 3\.0 MiB may be locked: 5\.0 MiB short\. Raise it",
    ):
        HostPool(driver, MIB, 8, limits=HostLimits(2**40, 3 * MIB))


def test_a_memlock_limit_that_the_driver_does_not_count_stops_nothing() -> None:
    driver = FakeDriver()
    pool = HostPool(driver, MIB, 8, limits=HostLimits(2**40, 3 * MIB), threads=1)
    assert list(driver.registered.values()) == [pool.pinned], "the trial page stayed registered"


def test_a_refused_registration_leaves_nothing_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real, mapped = mmap.mmap, []

    def record(*arguments: object, **options: object) -> mmap.mmap:
        mapped.append(real(*arguments, **options))
        return mapped[-1]

    monkeypatch.setattr(pool_module.mmap, "mmap", record)
    driver = FakeDriver()
    driver.fail_at = 0
    with pytest.raises(OutOfMemory):
        HostPool(driver, MIB, 1, limits=PLENTY, threads=1)
    assert not driver.leaks()
    assert len(mapped) == 1 and mapped[0].closed


def test_a_pool_that_is_dropped_unclosed_stays_mapped_while_it_is_registered() -> None:
    driver = FakeDriver()
    pool = HostPool(driver, MIB, 1, limits=PLENTY, threads=1)
    address = pool.address
    pool.row(0)[:] = 3
    del pool
    gc.collect()
    assert (driver.bytes_at(address, MIB) == 3).all()


def test_first_touch_reports_every_byte_and_backs_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[float] = []

    class Task:
        def advance(self, n: float) -> None:
            touched.append(n)

    monkeypatch.setattr(pool_module, "_STRIPE", 4 * mmap.PAGESIZE)
    memory = mmap.mmap(-1, 10 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(memory, np.uint8)
    for start in range(0, len(view), pool_module._STRIPE):
        pool_module._touch(view[start : start + pool_module._STRIPE], Task())  # type: ignore[arg-type]
    assert sum(touched) == 10 * mmap.PAGESIZE
    assert _resident_pages(view) == 10


def test_first_touch_works_on_kernels_that_cannot_populate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "_POPULATE_WRITE", 9999)
    memory = mmap.mmap(-1, 10 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    view = np.frombuffer(memory, np.uint8)
    pool_module._first_touch(memory, view, 2, SILENT)
    assert _resident_pages(view) == 10


def _resident_pages(view: np.ndarray) -> int:
    import ctypes

    pages = len(view) // mmap.PAGESIZE
    flags = (ctypes.c_ubyte * pages)()
    assert (
        ctypes.CDLL(None).mincore(ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(view)), flags) == 0
    )
    return sum(f & 1 for f in flags)


def test_limits_are_those_of_the_machine() -> None:
    limits = HostLimits.probe()
    assert 0 < limits.available < 2**50
    assert limits.memlock is None or limits.memlock >= 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=30))
def test_slots_hand_out_each_slot_once_lowest_first(steps: list[tuple[bool, int]]) -> None:
    slots, held = Slots(12, 10), []
    for take, n in steps:
        if take:
            free = [s for s in range(10) if s not in held]
            if n > len(free):
                with pytest.raises(ResourceError, match=f"{n} slots needed, {len(free)} free"):
                    slots.take(n)
            else:
                assert slots.take(n).tolist() == free[:n]
                held += free[:n]
        else:
            slots.give(np.array(held[:n], dtype=np.int64))
            held = held[n:]
        assert slots.used == len(held) and slots.free == 10 - len(held)


def test_giving_a_slot_back_twice_is_an_error() -> None:
    slots = Slots(4)
    taken = slots.take(2)
    with pytest.raises(ValueError, match="not taken"):
        slots.give(np.array([0, 0]))
    slots.give(taken)
    with pytest.raises(ValueError, match="not taken"):
        slots.give(taken[:1])
