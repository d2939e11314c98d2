"""Which pages of a KV cache with a ring are handed out, over the real backing, with SGLang's list of free pages."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from q38.kvcache.addressing import Paging
from q38.kvcache.backing import Backing, KvRefused
from q38.kvcache.layout import TIERED, KvLayout
from q38.sglang_ext.host_memory import HostMemory
from q38.sglang_ext.kv_memory import KvMemory

PAGES, SIZE = 16, 64


class Allocator(SimpleNamespace):
    """The free pages as SGLang's paged allocator keeps them: taken from the front, given back to the front."""

    def __init__(self) -> None:
        super().__init__(free_pages=torch.arange(1, PAGES + 1), staged_pages=[], num_staged_pages=0)

    def available_size(self) -> int:
        return len(self.free_pages) * SIZE

    def get_all_free_pages(self) -> torch.Tensor:
        return self.free_pages

    def merge_and_sort_free(self) -> None:
        pass

    def take(self, pages: int) -> list[int]:
        taken, self.free_pages = self.free_pages[:pages], self.free_pages[pages:]
        return [int(page) for page in taken]

    def give(self, pages: list[int]) -> None:
        self.free_pages = torch.cat((torch.tensor(pages), self.free_pages))


def memory(name: str, ring_pages: int = 0, limit: int | None = None) -> tuple[KvMemory, Allocator]:
    layout = KvLayout(name, 1, 2, 64, ring_pages * SIZE)
    backing = Backing(HostMemory(), layout, Paging(PAGES * SIZE, SIZE), limit=limit)
    return KvMemory(backing, lambda: None), Allocator()


def hand_out(state: KvMemory, allocator: Allocator, pages: int) -> list[int]:
    state.ensure(allocator, pages, now=True)
    return allocator.take(pages)


def test_pages_of_a_request_do_not_take_each_others_places_in_the_ring() -> None:
    state, allocator = memory(TIERED, ring_pages=8)
    assert hand_out(state, allocator, 7) == [1, 2, 3, 4, 5, 6, 7]
    allocator.give([2, 5])
    state.trim(allocator)
    # Of the places after that of page 7: 0, and so on; 2 and 10 share one, 5 and 13 too.
    assert hand_out(state, allocator, 8) == [8, 9, 2, 11, 12, 5, 14, 15]
    assert hand_out(state, allocator, 3) == [16, 10, 13]


def test_without_a_ring_low_pages_come_first() -> None:
    state, allocator = memory("int4")
    assert hand_out(state, allocator, 7) == [1, 2, 3, 4, 5, 6, 7]
    allocator.give([5, 2])
    state.trim(allocator)
    assert hand_out(state, allocator, 4) == [2, 5, 8, 9]


@pytest.mark.parametrize("pages", [0, 20])
def test_asking_for_none_or_for_more_than_there_are_is_no_error(pages: int) -> None:
    state, allocator = memory(TIERED, ring_pages=8)
    state.ensure(allocator, pages)
    allocator.take(PAGES)
    state.ensure(allocator, pages)


def test_where_memory_is_short_low_pages_are_taken_instead() -> None:
    state, allocator = memory(TIERED, ring_pages=8)
    hand_out(state, allocator, 7)
    allocator.give([1, 2])
    state.trim(allocator)
    assert allocator.free_pages[:3].tolist() == [8, 1, 2]
    # Page 8 is the first whose scales lie in a second chunk; there is memory for two pages in the first.
    state.backing.limit = state.backing.committed + state.backing._missing([1, 2])
    assert state.backing._missing([8, 1]) > state.backing._missing([1, 2])
    assert hand_out(state, allocator, 2) == [1, 2]
    with pytest.raises(KvRefused):
        state.ensure(allocator, 1)


def test_where_memory_is_short_pages_that_have_some_come_first() -> None:
    state, allocator = memory(TIERED, ring_pages=8)
    hand_out(state, allocator, 12)
    allocator.give([3, 4])
    state.trim(allocator)
    allocator.give([9, 10])  # of a request that has just ended
    state.backing.limit = state.backing.committed
    with pytest.raises(KvRefused):
        state.ensure(allocator, 6)  # of one that waits and does not fit
    assert hand_out(state, allocator, 2) == [9, 10]


def test_pages_given_back_since_the_last_idle_moment_are_put_in_order_too() -> None:
    state, allocator = memory(TIERED, ring_pages=8)
    hand_out(state, allocator, 11)
    allocator.give([2, 3, 10, 11])
    # Two pairs of them share a place; the newest page that is in use is 9.
    assert hand_out(state, allocator, 4) == [2, 3, 12, 13]
    assert hand_out(state, allocator, 3) == [14, 15, 16]


def test_pages_that_are_only_looked_at_do_not_count_as_handed_out() -> None:
    state, allocator = memory(TIERED, ring_pages=2)
    assert hand_out(state, allocator, 3) == [1, 2, 3]
    state.ensure(allocator, 6)
    allocator.give([2])
    state.trim(allocator)
    assert allocator.free_pages[:4].tolist() == [2, 5, 4, 7]


def test_the_next_request_goes_on_after_the_newest_page_that_is_kept() -> None:
    """The fourth page was not full, so no prefix keeps it: its place is free for what follows the third."""
    state, allocator = memory(TIERED, ring_pages=8)
    assert hand_out(state, allocator, 4) == [1, 2, 3, 4]
    allocator.give([4])
    state.trim(allocator)
    assert hand_out(state, allocator, 3) == [4, 5, 6]


def test_where_nothing_is_kept_low_pages_come_first() -> None:
    state, allocator = memory(TIERED, ring_pages=8)
    allocator.give(hand_out(state, allocator, 5)[::-1])
    state.trim(allocator)
    assert allocator.free_pages.tolist() == list(range(1, PAGES + 1))
