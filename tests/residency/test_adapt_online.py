"""Online adaptation on the fake driver: counters, heat, bounded swaps, no waiting."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.base.errors import ResourceError
from q38.residency.adapt import Adapter, AdaptSettings
from q38.residency.driver import OutOfMemory
from q38.residency.heat import HeatTracker
from tests.residency.fake_driver import FakeDriver
from tests.residency.fake_rows import (
    EXPERTS,
    LAYERS,
    ROW,
    Counted,
    check_books,
    check_rows,
    device_table,
    launch_replay,
    make_cache,
)

TOP_K = 2


def make_adapter(driver: FakeDriver, prior: np.ndarray | None = None, **settings: float) -> Adapter:
    cache = make_cache(driver, scratch=4 * LAYERS * EXPERTS)
    heat = np.ones((LAYERS, EXPERTS)) if prior is None else prior
    chosen = AdaptSettings(**({"interval": 4, "prior_tokens": 1.0} | settings))
    return Adapter(cache, heat, Counted(cache), top_k=TOP_K, settings=chosen)


def run(adapter: Adapter, driver: FakeDriver, experts: tuple[int, ...], steps: int) -> int:
    """Decode steps that choose the same experts in every layer; returns the pairs started."""
    started = 0
    for _ in range(steps):
        for layer in range(LAYERS):
            adapter.counts.add(layer, experts)
        started += adapter.step()
        for stream in list(driver.streams):
            driver.advance(stream)
    return started


def test_hot_rows_on_the_host_come_to_the_device_a_bounded_number_at_a_time() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver, swaps=2, half_life=50.0)
    cache = adapter.cache
    run(adapter, driver, (6, 7), 8)
    swapped = int((cache.resident[:, 6:]).sum())
    assert swapped == 2, "one interval swaps two pairs"
    run(adapter, driver, (6, 7), 40)
    assert cache.resident[:, 6:].all()
    assert cache.resident.sum() == 12, "swaps keep the size"
    check_rows(driver, device_table(cache, driver))
    check_books(cache, driver)


def test_nothing_is_swapped_by_default_but_the_heat_follows() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver)
    before = adapter.cache.resident.copy()
    assert run(adapter, driver, (6, 7), 20) == 0
    assert (adapter.cache.resident == before).all()
    assert (
        adapter.cache.heat.reshape(LAYERS, EXPERTS)[0, 6] > adapter.cache.heat.reshape(LAYERS, EXPERTS)[0, 0]
    )


def test_a_steady_workload_that_fits_swaps_nothing() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver, swaps=4)
    assert run(adapter, driver, (0, 1), 40) == 0


def test_counters_may_wrap_around() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver)
    adapter.counts.device.fill_(-1)  # 2^32 - 1 as the reader sees it
    run(adapter, driver, (0, 1), 6)
    adapter.tracker.counts[:] = 0
    adapter.tracker.tokens = 0
    run(adapter, driver, (0, 1), 8)
    assert adapter.tracker.counts.max() < 20


def test_a_step_never_waits_for_the_device() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver, swaps=2)
    driver.calls.clear()
    for _ in range(20):
        adapter.step()  # no stream advances
    assert not {"synchronize", "wait"} & set(driver.calls)


def test_counters_are_read_only_when_their_copy_has_arrived() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver)
    adapter.counts.add(0, (1, 2))
    driver.calls.clear()
    for _ in range(20):
        adapter.step()
    assert adapter.tracker.tokens == 0
    assert driver.calls.count("copy") == 1, "a second copy was enqueued before the first was read"
    for stream in list(driver.streams):
        driver.advance(stream)
    adapter.step()
    assert adapter.tracker.counts[0, 1] == pytest.approx(1, rel=1e-3)


def test_a_step_during_capture_only_counts_tokens() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver, swaps=2)
    driver.capture = True
    driver.calls.clear()
    for _ in range(10):
        assert adapter.step() == 0
    assert set(driver.calls) == {"capturing"}
    driver.capture = False
    adapter.step()
    assert "copy" in driver.calls


def test_out_of_memory_at_any_call_loses_no_row_and_the_next_steps_go_on() -> None:
    for call in range(60):
        driver = FakeDriver()
        adapter = make_adapter(driver, swaps=2, half_life=50.0)
        driver.fail_at = call
        try:
            run(adapter, driver, (6, 7), 8)
        except OutOfMemory:
            check_rows(driver, device_table(adapter.cache, driver))
            check_books(adapter.cache, driver)
            run(adapter, driver, (6, 7), 60)
            assert adapter.cache.resident[:, 6:].all(), f"call {call}"
        else:
            assert call > 10
            return


@given(tokens=st.integers(1, 400), half_life=st.floats(10, 5000))
def test_a_long_reading_weighs_as_its_tokens_one_after_the_other(tokens: int, half_life: float) -> None:
    prior = np.ones((1, 2))
    whole, parts = (HeatTracker(prior, prior_tokens=1.0, half_life=half_life) for _ in range(2))
    for tracker in (whole, parts):
        tracker.add(np.array([[50.0, 0.0]]), 50.0)
    whole.add(np.array([[0.0, tokens]]), tokens)
    for _ in range(tokens * 4):
        parts.add(np.array([[0.0, 0.25]]), 0.25)
    assert whole.tokens == pytest.approx(parts.tokens)
    assert whole.counts == pytest.approx(parts.counts)
    assert whole.tokens <= half_life / np.log(2)


def test_nothing_read_changes_nothing() -> None:
    tracker = HeatTracker(np.ones((1, 2)), prior_tokens=1.0, half_life=10.0)
    tracker.add(np.zeros((1, 2)), 0.0)
    assert (tracker.tokens, tracker.counts.sum()) == (0, 0)


def test_it_begins_again_from_another_profile() -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver, swaps=2, half_life=50.0, prior_tokens=20.0)
    run(adapter, driver, (6, 7), 8)
    other = np.ones((LAYERS, EXPERTS))
    other[:, 5] = 1000
    adapter.follow(other, 20.0)
    run(adapter, driver, (), 20)
    assert adapter.cache.resident[:, 5].all()
    assert adapter.swapped > 0


@given(prior=st.lists(st.floats(0, 1e9), min_size=LAYERS * EXPERTS, max_size=LAYERS * EXPERTS))
def test_a_profile_may_have_any_unit(prior: list[float]) -> None:
    driver = FakeDriver()
    adapter = make_adapter(driver, np.array(prior).reshape(LAYERS, EXPERTS))
    rates = adapter.tracker.rates()
    assert np.isfinite(rates).all()
    assert ((rates.sum(1) < TOP_K * (1 + 1e-9)) & (rates >= 0).all(1)).all()


def test_the_pool_must_have_scratch_memory_for_the_counters() -> None:
    driver = FakeDriver()
    with pytest.raises(Exception, match="bytes of scratch needed"):
        Counted(make_cache(driver))


_OFTEN = ["decode"] * 6 + ["advance"] * 3  # an exchange takes several steps
_SELDOM = ["grow", "shrink", "free", "fill", "status"]


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(_OFTEN + _SELDOM), st.integers(0, 7)), min_size=20, max_size=80
    )
)
def test_exchanges_and_requested_changes_in_any_order_lose_no_row(actions: list[tuple[str, int]]) -> None:
    """The KV cache takes and gives back memory, and people ask for changes, while exchanges are under way."""
    driver = FakeDriver()
    adapter = make_adapter(driver, swaps=2, half_life=20.0, interval=1)
    cache = adapter.cache
    changes = {
        "grow": lambda n: cache.grow(n),
        "shrink": lambda n: cache.shrink(n),
        "free": lambda n: cache.free(n * ROW),
        "fill": lambda n: cache.fill(n * ROW),
    }
    for action, n in actions:
        if action == "decode":
            for layer in range(LAYERS):
                adapter.counts.add(layer, (n, (n + 1) % EXPERTS))
            adapter.step()
            launch_replay(cache, driver)
        elif action == "advance":  # all, or one and the others stay behind
            streams = list(driver.streams)
            for stream in streams if n < 4 else [streams[n % len(streams)]]:
                driver.advance(stream)
        elif action == "status":
            cache.status()
        else:
            with suppress(ResourceError):  # more than there is
                changes[action](n)
    for stream in list(driver.streams):
        driver.advance(stream)
    cache.store.settle()
    check_rows(driver, device_table(cache, driver))
    check_books(cache, driver)
