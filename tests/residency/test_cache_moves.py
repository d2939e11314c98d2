"""Operations of the elastic cache, one at a time, and exact roll-back at every driver call."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from q38.base.errors import ResourceError
from q38.residency.cache import ExpertCache, open_cache
from q38.residency.driver import CudaError, OutOfMemory
from q38.residency.pool import HostLimits
from tests.residency.fake_driver import FakeDriver
from tests.residency.fake_rows import (
    CHUNK,
    EXPERTS,
    LAYERS,
    PLENTY,
    ROW,
    ROWS,
    check_books,
    check_rows,
    device_table,
    launch_replay,
    make_cache,
    snapshot,
)

Operation = Callable[[ExpertCache], object]


def test_grow_brings_in_the_hottest_host_rows_of_any_layer() -> None:
    cache = make_cache(FakeDriver())
    heat = np.zeros((LAYERS, EXPERTS))
    heat[2, 7], heat[0, 5] = 2, 1
    cache.set_heat(heat)
    cache.grow(2)
    assert cache.resident[2, 7] and cache.resident[0, 5]
    assert cache.budgets.tolist() == [5, 4, 5]


def test_shrink_sends_the_coldest_device_rows_to_the_host_and_returns_their_memory() -> None:
    driver = FakeDriver()
    cache = make_cache(driver, 8, spare=0)
    before = driver.committed
    cache.shrink(12)
    assert cache.resident.sum() == 12
    assert before - driver.committed == 480 // CHUNK * CHUNK + CHUNK  # 960 bytes need 8 chunks, 480 need 4
    assert cache.budgets.tolist() == [8, 4, 0]  # heat falls with the row number


def test_budgets_hold_the_hottest_of_each_layer() -> None:
    cache = make_cache(FakeDriver())
    cache.set_heat(np.tile(np.arange(EXPERTS, dtype=float), (LAYERS, 1)))
    cache.set_budgets(np.array([0, 3, 8]))
    assert cache.budgets.tolist() == [0, 3, 8]
    assert np.flatnonzero(cache.resident[1]).tolist() == [5, 6, 7]


def test_free_gives_back_at_least_what_was_asked_when_the_pool_has_room() -> None:
    driver = FakeDriver()
    cache = make_cache(driver, 6)
    free = driver.memory()[0]
    returned = cache.free(200)
    assert returned >= 200 and driver.memory()[0] - free == returned


def test_free_returns_what_the_pool_has_room_for_and_keeps_the_spare_slots() -> None:
    driver = FakeDriver()
    cache = make_cache(driver, 6, fewest=16, spare=2)
    cache.free(10_000)
    assert cache.resident.sum() == 16
    assert cache.store.pool.slots.free == 2
    assert cache.free(10_000) == 0


def test_fill_takes_the_free_memory_above_the_reserve() -> None:
    driver = FakeDriver(total=6 * CHUNK)
    cache = make_cache(driver, 1, spare=1)
    rows = cache.fill(CHUNK)
    assert driver.memory()[0] == CHUNK
    assert rows == 5 * CHUNK // ROW - 1 - 3
    assert cache.fill(CHUNK) == 0


def test_fill_takes_less_when_another_process_was_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(total=6 * CHUNK)
    cache = make_cache(driver, 1, spare=1)
    monkeypatch.setattr(driver, "memory", lambda: (20 * CHUNK, 20 * CHUNK))  # what was free a moment ago
    assert cache.fill(0) > 0
    assert driver.committed <= driver.total
    check_books(cache, driver)


def test_rows_that_fit_neither_side_are_refused_with_the_shortfall_before_anything_moves() -> None:
    cache = make_cache(FakeDriver(), 6, fewest=16, spare=2)
    before = snapshot(cache)
    with pytest.raises(
        ResourceError, match=r"24 rows would be on the host, it holds 10: 14 short .*Keep at least 14"
    ):
        cache.set_budgets(np.zeros(LAYERS, int))
    assert snapshot(cache) == before


def test_an_exchange_larger_than_the_spare_slots_goes_in_rounds() -> None:
    driver = FakeDriver()
    cache = make_cache(driver, 4, fewest=12, spare=1)
    driver.calls.clear()
    cache.set_resident(~cache.resident)
    check_rows(driver, device_table(cache, driver))
    assert driver.calls.count("copy") > 10
    assert cache.store.pool.slots.free == 1


def test_without_any_free_slot_an_exchange_is_refused() -> None:
    driver = FakeDriver(granularity=8)
    mask = np.zeros((LAYERS, EXPERTS), bool)
    mask[0] = True
    cache = open_cache(
        driver,
        ROW,
        mask,
        np.ones((LAYERS, EXPERTS)),
        stream=driver.new_stream(),
        spare=0,
        chunk=ROW,
        limits=PLENTY,
    )
    with pytest.raises(ResourceError, match="no slot is free to exchange rows through"):
        cache.set_resident(np.roll(mask, 1, axis=0))


def test_a_resize_is_one_batch_of_copies() -> None:
    driver = FakeDriver()
    cache = make_cache(driver)
    driver.calls.clear()
    cache.grow(10)
    assert driver.calls.count("copy") == 2  # the rows, and the table


def test_swaps_complete_over_later_polls_and_the_rows_stay_readable_between() -> None:
    driver = FakeDriver()
    cache = make_cache(driver, spare=2)
    promote, demote = np.flatnonzero(~cache.store.on_device)[:2], np.flatnonzero(cache.store.on_device)[:2]
    launch_replay(cache, driver)
    assert cache.begin_swaps(promote, demote) == 2
    assert not cache.poll(), "the copies have not run"
    assert cache.begin_swaps(promote, demote) == 0, "one exchange at a time"
    driver.advance(cache.store._copies)
    assert not cache.poll(), "kernels enqueued before may hold the old addresses"
    check_rows(driver, device_table(cache, driver))
    launch_replay(cache, driver)
    driver.advance(cache.store.stream)
    assert cache.poll()
    assert cache.store.on_device[promote].all() and not cache.store.on_device[demote].any()
    check_books(cache, driver)


def test_growing_during_a_swap_waits_for_it() -> None:
    driver = FakeDriver()
    cache = make_cache(driver, spare=2)
    promote, demote = np.flatnonzero(~cache.store.on_device)[:1], np.flatnonzero(cache.store.on_device)[:1]
    cache.begin_swaps(promote, demote)
    cache.grow(3)
    assert cache.store.idle and cache.store.on_device[promote].all()


def test_a_move_that_lacks_slots_on_one_side_takes_none_on_the_other() -> None:
    cache = make_cache(FakeDriver(), fewest=12, spare=1)
    before = snapshot(cache)
    with pytest.raises(ResourceError, match="2 host slots needed, 1 free: 1 short"):
        cache.store.move(np.array([4, 0, 1]), np.array([True, False, False]))
    assert snapshot(cache) == before


def test_a_second_move_while_one_is_under_way_is_an_error() -> None:
    cache = make_cache(FakeDriver())
    cache.store.begin(np.array([0]), np.array([False]))
    with pytest.raises(ValueError, match="another move is under way"):
        cache.store.begin(np.array([1]), np.array([False]))


@pytest.mark.parametrize("operation", ["grow", "shrink", "fill", "free"])
def test_every_resize_is_refused_during_capture(operation: str) -> None:
    driver = FakeDriver()
    cache = make_cache(driver)
    driver.capture = True
    before = snapshot(cache)
    with pytest.raises(ResourceError, match="a CUDA graph is being captured"):
        getattr(cache, operation)(1)
    assert snapshot(cache) == before


def test_a_poll_during_capture_does_nothing() -> None:
    driver = FakeDriver()
    cache = make_cache(driver)
    cache.begin_swaps(np.array([7]), np.array([0]))
    driver.advance(cache.store._copies)
    driver.capture = True
    driver.calls.clear()
    assert not cache.poll()
    assert driver.calls == ["capturing"]


OPERATIONS: dict[str, Operation] = {
    "grow": lambda cache: cache.grow(7),
    "shrink": lambda cache: cache.shrink(9),
    "shrink with holes": lambda cache: (
        cache.set_heat(-cache.heat.reshape(LAYERS, EXPERTS)),
        cache.shrink(9),
    ),
    "free": lambda cache: cache.free(256),
    "budgets": lambda cache: cache.set_budgets(np.array([1, 8, 5])),
    "exchange": lambda cache: cache.set_resident(np.roll(cache.resident, 2, axis=1)),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_out_of_memory_at_any_call_rolls_back_exactly_or_leaves_finished_rounds(name: str) -> None:
    operation = OPERATIONS[name]
    for call in range(500):
        driver = FakeDriver(seed=call)
        cache = make_cache(driver, 4, spare=2)
        before, resident = snapshot(cache), cache.resident.copy()
        launch_replay(cache, driver)
        driver.calls.clear()
        driver.fail_at = call
        try:
            operation(cache)
        except CudaError:
            pass
        else:
            assert driver.fail_at is not None and call > 10, "a failure was swallowed"
            return
        copied = "copy" in driver.calls[:call]
        check_books(cache, driver)
        check_rows(driver, device_table(cache, driver))
        if not copied and driver.calls[call] != "copy":
            assert snapshot(cache) == before, f"call {call} ({driver.calls[call]}) left a trace"
        launch_replay(cache, driver)
        cache.set_resident(resident)  # nothing that failed stands in the way of the next operation
        check_books(cache, driver)
        check_rows(driver, device_table(cache, driver))
        driver.advance(cache.store.stream)
        assert cache.store.arena.committed == before[4], f"call {call} lost device memory"
        cache.close()
        assert not driver.leaks()
    raise AssertionError("the operation never ran through")


def test_a_failed_grow_moves_nothing_up_to_the_switch_of_the_table() -> None:
    for call in range(100):
        driver = FakeDriver()
        cache = make_cache(driver)
        before = snapshot(cache)
        driver.calls.clear()
        driver.fail_at = call
        try:
            cache.grow(7)
        except OutOfMemory:
            table = [i for i, name in enumerate(driver.calls) if name == "copy"][1:2]
            switched = bool(table) and call > table[0]
            if not switched:
                assert snapshot(cache) == before, f"call {call}: {driver.calls[call]}"
            continue
        assert call > 5
        return


def test_opening_refuses_and_keeps_nothing_when_any_call_fails() -> None:
    for call in range(200):
        driver = FakeDriver()
        stream = driver.new_stream()
        driver.fail_at = call
        mask = np.ones((LAYERS, EXPERTS), bool)
        mask[:, 5:] = False
        try:
            cache = open_cache(
                driver,
                ROW,
                mask,
                np.ones((LAYERS, EXPERTS)),
                stream=stream,
                chunk=CHUNK,
                limits=PLENTY,
                threads=1,
            )
        except OutOfMemory:
            assert not driver.leaks(), f"call {call}: {driver.calls[-1]}"
            continue
        assert call > 8
        driver.fail_at = None
        cache.close()
        return


def test_status_reports_rows_bytes_and_the_expected_hit_rate() -> None:
    cache = make_cache(FakeDriver(), 4, fewest=9, spare=2)
    status = cache.status()
    assert status["rows_per_layer"] == [4, 4, 4] and status["rows_on_host"] == 12
    assert status["host_bytes_requested"] == (ROWS - 9 + 2) * ROW + ROWS * 8
    assert status["device_bytes"] == -(-14 * ROW // CHUNK) * CHUNK
    heat = np.arange(24, 0, -1).reshape(3, 8)
    assert status["expected_hit_rate"] == pytest.approx(heat[:, :4].sum() / heat.sum())


def test_a_heat_of_another_shape_or_with_a_nan_is_refused() -> None:
    cache = make_cache(FakeDriver())
    for bad in (np.ones((EXPERTS, LAYERS)), np.full((LAYERS, EXPERTS), np.nan)):
        with pytest.raises(ValueError, match="heat must be finite"):
            cache.set_heat(bad)


def test_rows_beyond_both_memories_are_refused_at_start() -> None:
    driver = FakeDriver(total=2 * CHUNK)
    with pytest.raises(OutOfMemory):
        make_cache(driver, 8)
    assert not driver.leaks()
    with pytest.raises(ResourceError, match="short"):
        open_cache(
            driver, ROW, np.zeros((LAYERS, EXPERTS), bool), np.ones((LAYERS, EXPERTS)), stream=0, limits=HostLimits(600, None),
            keep=0,
        )  # fmt: skip
    assert not driver.leaks()
