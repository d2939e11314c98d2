"""The cache under random operations, late streams, and an out-of-memory at any driver call."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from q38.base.errors import ResourceError
from tests.residency.fake_driver import FakeDriver
from tests.residency.fake_rows import (
    EXPERTS,
    LAYERS,
    ROW,
    ROWS,
    check_books,
    check_rows,
    device_table,
    launch_replay,
    make_cache,
    snapshot,
)

FAILURE = st.one_of(st.none(), st.integers(0, 25))
COUNT = st.integers(0, ROWS)


class CacheMachine(RuleBasedStateMachine):
    """Each rule may fail at one driver call; the invariants hold whatever happened."""

    @initialize(
        total=st.sampled_from([512, 768, 1024, 4096]),
        resident=st.integers(0, 3),
        fewest=st.integers(0, 9),
        spare=st.integers(0, 3),
        seed=st.integers(0, 9),
    )
    def start(self, total: int, resident: int, fewest: int, spare: int, seed: int) -> None:
        self.driver = FakeDriver(total=total, seed=seed)
        self.cache = make_cache(self.driver, resident, fewest=fewest, spare=spare)

    def attempt(self, fail: int | None, operation: str, *arguments: object) -> None:
        self.driver.fail_at = fail
        try:
            getattr(self.cache, operation)(*arguments)
        except ResourceError:
            pass
        finally:
            self.driver.fail_at = None

    @rule(rows=COUNT, fail=FAILURE)
    def grow(self, rows: int, fail: int | None) -> None:
        self.attempt(fail, "grow", rows)

    @rule(rows=COUNT, fail=FAILURE)
    def shrink(self, rows: int, fail: int | None) -> None:
        self.attempt(fail, "shrink", rows)

    @rule(reserve=st.integers(0, 1024), fail=FAILURE)
    def fill(self, reserve: int, fail: int | None) -> None:
        self.attempt(fail, "fill", reserve)

    @rule(nbytes=st.integers(0, 1024), fail=FAILURE)
    def free(self, nbytes: int, fail: int | None) -> None:
        self.attempt(fail, "free", nbytes)

    @rule(budgets=st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS), fail=FAILURE)
    def set_budgets(self, budgets: list[int], fail: int | None) -> None:
        self.attempt(fail, "set_budgets", np.array(budgets))

    @rule(bits=st.integers(0, 2**ROWS - 1), fail=FAILURE)
    def set_resident(self, bits: int, fail: int | None) -> None:
        mask = (bits >> np.arange(ROWS)) & 1 == 1
        self.attempt(fail, "set_resident", mask.reshape(LAYERS, EXPERTS))

    @rule(seed=st.integers(0, 99))
    def set_heat(self, seed: int) -> None:
        self.cache.set_heat(np.random.default_rng(seed).random((LAYERS, EXPERTS)))

    @rule(pairs=st.integers(1, 4), fail=FAILURE)
    def begin_swaps(self, pairs: int, fail: int | None) -> None:
        on_device = self.cache.store.on_device
        self.attempt(
            fail, "begin_swaps", np.flatnonzero(~on_device)[:pairs], np.flatnonzero(on_device)[:pairs]
        )

    @rule(fail=FAILURE)
    def poll(self, fail: int | None) -> None:
        self.attempt(fail, "poll")

    @rule()
    def replay(self) -> None:
        launch_replay(self.cache, self.driver)

    @rule(data=st.data(), operations=st.integers(1, 12))
    def advance(self, data: st.DataObject, operations: int) -> None:
        self.driver.advance(data.draw(st.sampled_from(sorted(self.driver.streams))), operations)

    @precondition(lambda self: self.cache.store.idle)
    @rule(nbytes=st.integers(0, 300))
    def capture_changes_nothing(self, nbytes: int) -> None:
        self.driver.capture = True
        before = snapshot(self.cache)
        self.attempt(None, "free", nbytes)
        self.attempt(None, "grow", 1)
        assert snapshot(self.cache) == before
        self.driver.capture = False

    @invariant()
    def every_row_is_readable(self) -> None:
        check_rows(self.driver, device_table(self.cache, self.driver))
        check_rows(self.driver, self.cache.store.table.current)

    @invariant()
    def nothing_is_lost(self) -> None:
        check_books(self.cache, self.driver)

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        self.cache.store.settle()
        self.cache.free(0)  # drops what failed roll-backs left behind
        check_books(self.cache, self.driver)
        assert self.cache.store.arena.committed == self.cache.store.arena.backed
        assert np.array_equal(device_table(self.cache, self.driver), self.cache.store.table.current)
        assert len(self.cache.store.place) * ROW == ROWS * ROW
        self.cache.close()
        assert not self.driver.leaks()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(
    max_examples=150, stateful_step_count=30, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
