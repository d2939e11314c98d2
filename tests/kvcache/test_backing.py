"""Memory behind the pages: what is mapped, what is refused, and a machine that runs out of memory anywhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from q38.kvcache.addressing import Paging
from q38.kvcache.backing import Backing, KvRefused, map_memory
from q38.kvcache.layout import KvLayout
from q38.kvcache.pool import KvPool
from q38.residency.driver import CudaError
from tests.residency.fake_driver import FakeDriver

LAYOUT = KvLayout("int4", 2, 1, 64)  # 32-byte payload rows, 4-byte scale rows: 144 bytes a slot
PAGE, TOKENS, CHUNK = 4, 80, 128


class Pages(FakeDriver):
    """Tensors may reach over addresses that are not backed, as they may on a GPU; only their use may not."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        memory = next(m for m, _, _ in self.reservations.values() if m.ctypes.data == address)
        return torch.from_numpy(memory[:nbytes])


def make(
    total: int = 2**20, *, headroom: int = 0, lender: Lender | None = None, tokens: int = TOKENS
) -> tuple[Pages, Backing]:
    driver = Pages(total=total, granularity=CHUNK)
    return driver, Backing(driver, LAYOUT, Paging(tokens, PAGE), headroom=headroom, lender=lender)


class Lender:
    """Holds device memory that it gives away, and some that steps keep."""

    def __init__(self, driver: Pages, nbytes: int, *, kept: int = 0) -> None:
        self.driver, self.asked, self.returned = driver, [], 0
        self.handles, self.steps = (
            [driver.create(CHUNK) for _ in range(size // CHUNK)] for size in (nbytes, kept)
        )

    def available(self) -> int:
        return len(self.handles) * CHUNK

    def lend(self, nbytes: int) -> None:
        self.asked.append(nbytes)
        for _ in range(min(-(-nbytes // CHUNK), len(self.handles))):
            self.driver.release(self.handles[-1])
            self.handles.pop()

    def take_back(self) -> None:
        self.returned += 1

    def kept(self) -> int:
        return len(self.steps) * CHUNK

    def give_back(self) -> None:
        while self.steps:
            self.driver.release(self.steps.pop())


def test_at_the_start_only_the_page_of_padded_steps_is_backed() -> None:
    driver, backing = make()
    assert backing.held.nonzero()[0].tolist() == [0]
    assert backing.committed == driver.committed == len(LAYOUT.parts()) * CHUNK


def test_pages_are_usable_once_ensured_and_every_buffer_keeps_its_address() -> None:
    driver, backing = make()
    before = [backing.address(part) for part in LAYOUT.parts()]
    assert backing.ensure([7, 3]) > 0
    for part in LAYOUT.parts():
        for page in (0, 3, 7):
            driver.bytes_at(backing.address(part) + page * PAGE * part.row_bytes, PAGE * part.row_bytes)
    assert [backing.address(part) for part in LAYOUT.parts()] == before
    assert backing.ensure([3, 7]) == 0


def test_no_more_than_the_limit_is_mapped() -> None:
    _, backing = make()
    backing.limit = backing.committed + 24 * CHUNK
    with pytest.raises(KvRefused, match=r"3\.0 KiB of GPU memory are free"):
        backing.ensure(range(1, 21))
    assert backing.refusal(80).fits == backing.refusal(16).fits == 12  # type: ignore[union-attr]
    backing.ensure([1, 2])
    assert backing.committed <= backing.limit


def test_pages_that_are_backed_already_need_no_memory() -> None:
    _, backing = make()
    backing.ensure(range(1, 11))
    backing.limit = backing.committed
    assert backing.refusal(40, reusable=10) is None
    refused = backing.refusal(41, reusable=10)
    assert refused is not None and (refused.tokens, refused.fits) == (41, 40)


def test_memory_goes_back_when_the_last_page_of_a_chunk_is_free() -> None:
    driver, backing = make()
    idle = driver.committed
    backing.ensure(range(1, 21))
    full = driver.committed
    assert backing.trim(range(1, 21)) == full - idle
    assert driver.committed == idle
    backing.close()
    assert not driver.leaks()


def test_a_page_in_the_middle_of_a_chunk_keeps_it() -> None:
    driver, backing = make()
    backing.ensure([1, 2])  # scale chunk 0 holds pages 0 to 7
    backing.trim([1])
    for part in LAYOUT.parts():
        driver.bytes_at(backing.address(part) + 2 * PAGE * part.row_bytes, PAGE * part.row_bytes)


def test_what_does_not_fit_is_refused_with_what_would_and_nothing_is_kept() -> None:
    driver, backing = make(total=4 * CHUNK * 8)
    before, held = driver.committed, backing.held
    with pytest.raises(KvRefused, match=r"80 tokens of KV cache do not fit.* would fit") as refused:
        backing.ensure(range(1, 21))
    assert (refused.value.tokens, refused.value.exit_code) == (80, 3)
    assert 0 < refused.value.fits < 80
    assert backing.refusal(refused.value.fits) is None
    assert backing.refusal(refused.value.fits + 1) is not None
    assert driver.committed == before
    assert np.array_equal(backing.held, held)
    backing.ensure(range(1, 1 + refused.value.fits // PAGE // 2))


def test_memory_that_another_process_took_meanwhile_is_refused_and_what_was_mapped_goes_back() -> None:
    class Busy(Pages):
        def memory(self) -> tuple[int, int]:
            return 2**30, 2**30  # more than `create` will give

    driver = Busy(total=40 * CHUNK, granularity=CHUNK)
    backing = Backing(driver, LAYOUT, Paging(TOKENS, PAGE))
    before = driver.committed
    with pytest.raises(KvRefused):
        backing.ensure(range(1, 21))
    assert driver.committed == backing.committed == before
    assert backing.held.nonzero()[0].tolist() == [0]


def test_the_lender_is_asked_before_anything_is_refused_and_for_what_is_missing() -> None:
    driver = Pages(total=120 * CHUNK, granularity=CHUNK)
    lender = Lender(driver, 80 * CHUNK)
    backing = Backing(driver, LAYOUT, Paging(TOKENS, PAGE), headroom=8 * CHUNK, lender=lender)
    backing.ensure(range(1, 21))
    assert lender.asked and all(0 < asked <= 80 * CHUNK for asked in lender.asked)
    assert driver.memory()[0] >= 8 * CHUNK


@pytest.mark.parametrize("free", [20, 10])
def test_what_steps_keep_is_headroom_and_is_given_back_before_anything_is_lent(free: int) -> None:
    """16 chunks are wanted and 12 must stay; 20 + 8 or 10 + 18 are there."""
    driver = Pages(total=1000 * CHUNK, granularity=CHUNK)
    lender = Lender(driver, 80 * CHUNK, kept=(28 - free) * CHUNK)
    backing = Backing(driver, LAYOUT, Paging(TOKENS, PAGE), headroom=12 * CHUNK, lender=lender)
    driver.total = driver.committed + free * CHUNK
    assert backing._missing(range(1, 5)) == 16 * CHUNK
    backing.ensure(range(1, 5))
    assert lender.asked == []
    assert bool(lender.steps) == (free == 20)  # given back only where the driver has too little
    assert driver.total - driver.committed + lender.kept() == 12 * CHUNK


def test_headroom_is_kept_down_to_its_half() -> None:
    small, _ = make()
    _, backing = make()
    need = backing.ensure(range(1, 21))
    _, backing = make(total=small.committed + need + 8 * CHUNK, headroom=16 * CHUNK)
    backing.ensure(range(1, 21))
    _, backing = make(total=small.committed + need + 7 * CHUNK, headroom=16 * CHUNK)
    with pytest.raises(KvRefused):
        backing.ensure(range(1, 21))


def test_admission_never_promises_what_ensuring_refuses() -> None:
    for chunks in range(8, 110, 3):
        _, backing = make(total=chunks * CHUNK)
        for tokens in (1, 4, 5, 40, 80):
            if backing.refusal(tokens) is None:
                backing.ensure(range(1, 1 + -(-tokens // PAGE)))
                backing.trim(range(1, 21))


def test_admission_refuses_more_than_there_are_pages() -> None:
    _, backing = make()
    assert backing.refusal(80) is None
    refused = backing.refusal(81)
    assert refused is not None and refused.fits == 80


def test_a_backing_that_cannot_start_leaves_nothing() -> None:
    driver = Pages(total=2 * CHUNK, granularity=CHUNK)
    with pytest.raises(CudaError):
        Backing(driver, LAYOUT, Paging(TOKENS, PAGE))
    assert not driver.leaks()


@given(st.data())
@settings(max_examples=20)
def test_rows_survive_whatever_happens_to_other_pages(data: st.DataObject) -> None:
    driver, backing = make()
    pool = KvPool(LAYOUT, Paging(TOKENS, PAGE).slots, memory=map_memory(backing, driver))
    pages = data.draw(st.lists(st.integers(1, 20), min_size=2, max_size=12, unique=True))
    kept, gone = pages[::2], pages[1::2]
    backing.ensure(pages)
    slots = torch.tensor([s for page in kept for s in Paging(TOKENS, PAGE).slots_of(page)])
    new = torch.randn(len(slots), 1, 64)
    pool.write(1, slots, new, new)
    before = pool.gather(1, "k", slots, torch.empty_like(new)).clone()
    backing.trim(gone)
    backing.ensure(gone)
    backing.trim(gone)
    assert torch.equal(pool.gather(1, "k", slots, torch.empty_like(new)), before)


class BackingMachine(RuleBasedStateMachine):
    """Hand out, free, trim and fail at any driver call. A page in use is always backed and keeps its bytes."""

    @initialize(chunks=st.integers(20, 130), headroom=st.sampled_from([0, 4 * CHUNK]))
    def start(self, chunks: int, headroom: int) -> None:
        self.driver = Pages(total=chunks * CHUNK, granularity=CHUNK)
        self.lender = Lender(self.driver, min(10, chunks - 10) * CHUNK)
        self.backing = Backing(
            self.driver, LAYOUT, Paging(TOKENS, PAGE), headroom=headroom, lender=self.lender
        )
        self.used: dict[int, int] = {}  # page -> byte that fills it
        self.stamp = 0

    @rule(data=st.data(), count=st.integers(1, 20))
    def hand_out(self, data: st.DataObject, count: int) -> None:
        free = [p for p in range(1, 21) if p not in self.used]
        pages = data.draw(st.permutations(free))[:count] if free else []
        try:
            self.backing.ensure(pages)
        except KvRefused:
            return
        except CudaError:
            assert self.driver.fail_at is None, "only an injected failure may come through"
            return
        for page in pages:
            self.stamp = self.stamp % 199 + 1
            self.used[page] = self.stamp
            for span in self.spans(page):
                span[:] = self.stamp

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for page in data.draw(st.lists(st.sampled_from(sorted(self.used)), unique=True)):
            del self.used[page]

    @rule()
    def trim(self) -> None:
        before = self.driver.fail_at
        try:
            self.backing.trim([p for p in range(1, 21) if p not in self.used])
        except CudaError:
            return
        if before is None:
            self.exactly_what_is_needed()

    @rule(calls=st.integers(0, 30))
    def fail_soon(self, calls: int) -> None:
        self.driver.fail_at = calls

    @rule()
    def stop_failing(self) -> None:
        self.driver.fail_at = None

    @rule()
    def lend_again(self) -> None:
        while len(self.lender.handles) < 3 and self.driver.total - self.driver.committed >= CHUNK:
            pending, self.driver.fail_at = self.driver.fail_at, None
            self.lender.handles.append(self.driver.create(CHUNK))
            self.driver.fail_at = pending

    def spans(self, page: int) -> list[np.ndarray]:
        return [
            self.driver.bytes_at(self.backing.address(p) + page * PAGE * p.row_bytes, PAGE * p.row_bytes)
            for p in LAYOUT.parts()
        ]

    def exactly_what_is_needed(self) -> None:
        pages = np.array(sorted({0, *self.used}))
        expected = 0
        for part in LAYOUT.parts():
            width = PAGE * part.row_bytes
            touched = {
                c for p in pages for c in range(p * width // CHUNK, ((p + 1) * width - 1) // CHUNK + 1)
            }
            expected += len(touched) * CHUNK
        assert self.backing.committed == expected

    @invariant()
    def pages_in_use_are_backed_and_keep_their_bytes(self) -> None:
        for page, stamp in self.used.items():
            assert self.backing.held[page]
            assert all((span == stamp).all() for span in self.spans(page))

    @invariant()
    def every_byte_is_accounted_for(self) -> None:
        assert self.driver.committed == self.backing.committed + self.lender.available()

    def teardown(self) -> None:
        if hasattr(self, "backing"):
            self.driver.fail_at = None
            self.backing.close()
            self.lender.lend(2**30)
            assert not self.driver.leaks()


BackingMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)
TestBacking = BackingMachine.TestCase
