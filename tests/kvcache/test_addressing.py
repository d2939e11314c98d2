"""The order in which free pages are handed out where a ring has a place for every slot."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from q38.kvcache.addressing import in_ring_order


def order(free: list[int], period: int, first: int) -> list[int]:
    return in_ring_order(np.array(free, np.int64), period, first).tolist()  # type: ignore[no-any-return]


def test_pages_without_gaps_stay_in_order() -> None:
    assert order(list(range(9, 30)), 8, 9) == list(range(9, 30))


def test_a_page_whose_place_is_taken_by_the_one_before_it_waits() -> None:
    # 2 and 10 share a place of 8: 10 comes when the others have had their turn.
    assert order([2, 10, 11, 12], 8, 2) == [2, 11, 12, 10]


def test_the_place_after_the_newest_page_comes_first_and_places_without_a_page_are_passed_over() -> None:
    assert order([1, 3, 6, 14], 8, 5) == [6, 1, 3, 14]


@given(free=st.sets(st.integers(1, 300), max_size=80), period=st.integers(1, 40), first=st.integers(0, 400))
def test_pages_that_follow_each_other_meet_as_late_as_they_can(
    free: set[int], period: int, first: int
) -> None:
    found = order(sorted(free), period, first)
    assert sorted(found) == sorted(free)
    places = [page % period for page in found]
    at = 0
    while at < len(found):  # every round has each place that still has a page exactly once, in turn
        size = len({page % period for page in found[at:]})
        turn = [(place - first) % period for place in places[at : at + size]]
        assert turn == sorted(set(turn))
        at += size
    for place in set(places):  # low pages first: they share more of what is mapped
        of_place = [page for page in found if page % period == place]
        assert of_place == sorted(of_place)
