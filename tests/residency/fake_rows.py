"""A small cache on the fake driver, whose rows have known bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from q38.residency.cache import ExpertCache, open_cache
from q38.residency.pool import HostLimits
from q38.residency.readback import Readback
from tests.residency.fake_driver import FakeDriver

LAYERS, EXPERTS, ROW = (
    3,
    8,
    40,
)  # a row of 40 bytes crosses the borders of 64-byte granules and 128-byte chunks
ROWS = LAYERS * EXPERTS
CHUNK = 128
PLENTY = HostLimits(2**40, None)


class Counted:
    """Selections in device memory of the driver, read back as a server does (q38.sglang_ext.traffic)."""

    def __init__(self, cache: ExpertCache) -> None:
        self.driver, self.nbytes = cache.store.driver, 4 * ROWS
        self.address = self.driver.allocate(self.nbytes)
        self.driver.tensor(self.address, self.nbytes).zero_()
        self.counts = np.zeros((LAYERS, EXPERTS), np.int64)
        self._last = np.zeros((LAYERS, EXPERTS), np.uint32)
        self._readback = Readback(cache.store, [self.address], self.nbytes)
        self.request = self._readback.request

    @property
    def device(self) -> torch.Tensor:
        """int32 [LAYERS, EXPERTS]."""
        return self.driver.tensor(self.address, self.nbytes).view(torch.int32).view(LAYERS, EXPERTS)

    @property
    def pending(self) -> bool:
        return self._readback.pending

    def add(self, layer: int, experts: Sequence[int]) -> None:
        for expert in experts:
            self.device[layer, expert] += 1

    def arrived(self) -> bool:
        if not self._readback.arrived():
            return False
        now = self._readback.memory.view(np.uint32).reshape(LAYERS, EXPERTS).copy()
        self.counts += (now - self._last).astype(np.int64)
        self._last = now
        return True


def content(row: int) -> np.ndarray:
    """uint8 [ROW]: what row number `row` holds, for life."""
    return ((np.arange(ROW) * 7 + row * 11 + 1) % 251).astype(np.uint8)


def make_cache(
    driver: FakeDriver, resident: int = 4, *, fewest: int = 0, spare: int = 2, **options: Any
) -> ExpertCache:
    """A filled and published cache with the first `resident` experts of each layer on the device."""
    mask = np.zeros((LAYERS, EXPERTS), bool)
    mask[:, :resident] = True
    heat = np.arange(ROWS, 0, -1, dtype=float).reshape(LAYERS, EXPERTS)
    stream = driver.new_stream()
    cache = open_cache(
        driver,
        ROW,
        mask,
        heat,
        stream=stream,
        fewest=fewest,
        spare=spare,
        chunk=CHUNK,
        limits=PLENTY,
        threads=1,
        **options,
    )
    fill(cache, driver)
    return cache


def fill(cache: ExpertCache, driver: FakeDriver) -> None:
    for row, address in enumerate(cache.store.addresses(cache.store.place).tolist()):
        driver.bytes_at(address, ROW)[:] = content(row)
    cache.store.publish()


def device_table(cache: ExpertCache, driver: FakeDriver) -> np.ndarray:
    """int64 [ROWS]: the table as kernels would read it now."""
    return driver.bytes_at(cache.store.table.address, cache.store.table.nbytes).view(np.int64).copy()


def check_rows(driver: FakeDriver, addresses: np.ndarray) -> None:
    """Every address holds its own row."""
    for row, address in enumerate(addresses.tolist()):
        assert np.array_equal(driver.bytes_at(address, ROW), content(row)), f"row {row} lost its bytes"


def launch_replay(cache: ExpertCache, driver: FakeDriver) -> None:
    """Enqueue a graph replay: it reads the table first and the rows later, as a kernel does."""
    seen: list[np.ndarray] = []
    driver.launch(cache.store.stream, lambda: seen.append(device_table(cache, driver)))
    driver.launch(cache.store.stream, lambda: check_rows(driver, seen[0]))


def check_books(cache: ExpertCache, driver: FakeDriver) -> None:
    """No slot leaked, no row twice, nothing held that is not accounted for."""
    store = cache.store
    places = store.place.tolist()
    assert len(set(places)) == ROWS, "two rows share a slot"
    held = (
        []
        if store._move is None
        else (store._move.old if store._move.state.name == "SWITCHING" else store._move.new).tolist()
    )
    assert not set(held) & set(places), "a slot held by a move belongs to a row"
    taken = set(np.flatnonzero(store.device._taken).tolist()) | {
        -1 - s for s in np.flatnonzero(store.pool.slots._taken).tolist()
    }
    assert taken == set(places) | set(held), "slots leaked"
    assert driver.committed == store.arena.committed, "device memory leaked"
    assert store.device.usable == min(ROWS, store.arena.backed // ROW), "backed memory is not used"
    assert all(p < store.arena.backed // ROW for p in places), "a row lies beyond the backed memory"


def snapshot(cache: ExpertCache) -> tuple[Any, ...]:
    """Everything an operation could change."""
    store = cache.store
    return (
        store.place.tolist(), store.device._taken.tolist(), store.pool.slots._taken.tolist(),
        store.device.usable, store.arena.committed, store.arena.backed, store.table.current.tolist(),
    )  # fmt: skip
