"""Pages and slots, in numbers.

Page p holds the slots p * size ... p * size + size - 1. Page 0 belongs to nobody: padded and captured steps
write to slot 0, so it is always backed and its content means nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Paging:
    """`tokens` slots in pages of `size`, and page 0 before them."""

    tokens: int
    size: int

    def __post_init__(self) -> None:
        if self.size <= 0 or self.tokens <= 0 or self.tokens % self.size:
            raise ValueError(f"{self.tokens} tokens in pages of {self.size}")

    @property
    def pages(self) -> int:
        """Pages that are handed out: numbers 1 to `pages`."""
        return self.tokens // self.size

    @property
    def slots(self) -> int:
        """Rows of every buffer, those of page 0 included."""
        return self.tokens + self.size

    def page_of(self, slot: int) -> int:
        """Page of a slot."""
        return slot // self.size

    def slots_of(self, page: int) -> range:
        """Slots of a page."""
        return range(page * self.size, (page + 1) * self.size)

    def pages_for(self, tokens: int) -> int:
        """Pages that so many tokens of one sequence take."""
        return -(-tokens // self.size)


def chunks_of(page: int, page_bytes: int, chunk: int) -> range:
    """Chunks of `chunk` bytes that a page of a buffer touches; the buffer has `page_bytes` a page."""
    first = page * page_bytes
    return range(first // chunk, (first + page_bytes - 1) // chunk + 1)


def in_ring_order(free: NDArray[np.integer], period: int, first: int) -> NDArray[np.integer]:
    """Free pages in an order in which those that follow each other do not meet in a ring of `period` pages.

    Page p belongs at place p mod period. Places come round from `first` on, each with its lowest free page, then with the
    next one, and so on; a place that has no free page left is passed over. Pages without gaps stay nearly in order.

    Args:
        free: page numbers, distinct.
    """
    free = np.sort(free)
    place = free % period
    by_place = np.argsort(place, kind="stable")
    round_of = np.empty(len(free), np.int64)  # how many lower free pages have the same place
    round_of[by_place] = np.arange(len(free)) - np.searchsorted(place[by_place], place[by_place])
    return free[np.argsort(round_of * period + (place - first) % period)]
