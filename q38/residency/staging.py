"""Host rows copied to the device ahead of the layers that read them: what goes where, and in which order.

A pass goes through the layers of one prompt step. The host rows of a layer are cut into pieces, and the pieces of all
layers take turns in a ring of a few pieces of device memory:

    copies    wait until the ring's piece was read, copy, say that it is filled
    kernels   wait until it is filled, read, say that it was read

The host enqueues both sides as it goes through the layers and waits for neither: the copies of the next layer run while
this one's attention does. The copy engine reaches the rate of the link, which a kernel that reads host memory does not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from q38.base.units import MIB
from q38.residency.driver import Addresses, Driver
from q38.residency.pool import Index

PIECES = 3  # of a ring: one that is read, one that is filled, one between
# Of a layer's host rows, how many a step must be expected to read for copying all of them to pay: read in place
# they cross the link at 44 GB/s, copied at 55 (benchmarks/prefill_staging.py).
WORTH = 0.8
# Bytes of a copy: what else the copy engine is asked for meanwhile waits 0.3 ms, not for a whole piece.
LONGEST = 16 * MIB
_MOST_TOKENS = 2**20


@dataclass(frozen=True)
class Piece:
    """Host rows of one layer that are copied together.

    begin, end: positions in the layer's order of experts.
    slot: the ring's piece that they go to.
    to, source, nbytes: int64 [copies]: rows that lie one after the other in the host pool are one copy, up to a limit.
    """

    begin: int
    end: int
    slot: int
    to: Addresses
    source: Addresses
    nbytes: Index


@dataclass(frozen=True)
class PassPlan:
    """All layers under one placement of the rows.

    positions: int32 [layers, experts]: where each expert stands in its layer's order: rows in device memory, then host rows.
    addresses: int64 [layers, experts], by position: where kernels read the row, in its slot or in the ring.
    resident: per layer, rows in device memory.
    pieces: of all layers, one after the other; those of layer l are [first[l], first[l + 1]).
    """

    positions: NDArray[np.int32]
    addresses: Addresses
    resident: list[int]
    pieces: list[Piece]
    first: list[int]


def plan_pass(
    places: Index,
    addresses: Addresses,
    row_bytes: int,
    *,
    ring: int,
    rows: int,
    pieces: int = PIECES,
    longest: int = LONGEST,
) -> PassPlan:
    """Cut the host rows of all layers into pieces.

    Args:
        places, addresses: int64 [layers, experts]: where each row lies, as in RowStore.
        ring: address of the ring. rows: row slots of one of its pieces. pieces: in the ring.
        longest: bytes of one copy at most, but a row at least.
    """
    layers, experts = places.shape
    positions, by_position = np.empty((layers, experts), np.int32), np.empty((layers, experts), np.int64)
    resident, found, first = [], list[Piece](), [0]
    for layer in range(layers):
        # Host rows in the order of their slots, so that runs of them are as long as they can be.
        order = np.argsort(np.where(places[layer] >= 0, -1, -1 - places[layer]), kind="stable")
        positions[layer, order] = np.arange(experts)
        by_position[layer] = addresses[layer, order]
        resident.append(int((places[layer] >= 0).sum()))
        host = experts - resident[-1]
        size = max(-(-host // max(-(-host // rows), 1)), 1)  # pieces alike, so that none is short
        for begin in range(resident[-1], experts, size):
            end, slot = min(begin + size, experts), len(found) % pieces
            source = by_position[layer, begin:end].copy()
            starts, nbytes = _runs(source, row_bytes, longest)
            to = ring + (slot * rows + np.arange(end - begin)) * row_bytes
            by_position[layer, begin:end] = to
            found.append(Piece(begin, end, slot, to[starts], source[starts], nbytes))
        first.append(len(found))
    return PassPlan(positions, by_position, resident, found, first)


def _runs(addresses: Addresses, row_bytes: int, longest: int) -> tuple[Index, Index]:
    """(first row, bytes) of each run of rows that lie one after the other, none longer than `longest` or a row."""
    index = np.arange(len(addresses))
    breaks = np.diff(addresses, prepend=addresses[0] - 2 * row_bytes) != row_bytes
    in_run = index - np.maximum.accumulate(np.where(breaks, index, 0))
    starts = np.flatnonzero(in_run % max(longest // row_bytes, 1) == 0)
    return starts, np.diff(starts, append=len(addresses)) * row_bytes


def fewest_tokens(heat: NDArray[np.float64], resident: NDArray[np.bool_], top_k: int) -> int:
    """The fewest tokens of a step that are expected to read `WORTH` of the host rows.

    Args:
        heat: [layers, experts], in proportion to how often each row is chosen. resident: bool, of the same shape.

    Returns:
        tokens, at most 2^20 where not even so many do.
    """
    total = heat.sum(axis=1, keepdims=True)
    share = np.where(total > 0, heat, 1.0) / np.where(total > 0, total, heat.shape[1])
    chosen = np.minimum(top_k * share, 1.0)[~resident]  # chance that a token chooses each host row
    if not len(chosen):
        return _MOST_TOKENS
    return bisect_left(
        range(_MOST_TOKENS), WORTH, lo=1, key=lambda tokens: float(np.mean(1 - (1 - chosen) ** tokens))
    )


def ring_rows(host_rows: int, experts: int, tokens: int, top_k: int) -> int:
    """Row slots of a ring for layers with so many host rows each; 0 where steps of `tokens` are too short for staging.

    Half a layer's host rows: about what crosses the link while the rest of a layer, attention before all, computes. With a third
    the link waits, all of them gain nothing (benchmarks/prefill_staging.py, docs/decisions.md).
    """
    chosen = 1 - (1 - min(top_k / experts, 1.0)) ** tokens  # all experts alike
    return -(-host_rows // (2 * PIECES)) * PIECES if chosen >= WORTH else 0


class Ring:
    """Device memory for staged rows, and the order of copies into it and reads from it.

    Args:
        rows: row slots, of all pieces together.

    Raises:
        CudaError: no memory.
    """

    def __init__(self, driver: Driver, row_bytes: int, rows: int, *, pieces: int = PIECES) -> None:
        self.driver, self.row_bytes, self.pieces = driver, row_bytes, pieces
        self.piece_rows = max(rows // pieces, 1)
        self.address = driver.allocate(self.pieces * self.piece_rows * row_bytes)
        self._copies = driver.new_stream()
        self._filled = [driver.new_event() for _ in range(pieces)]
        self._read = [driver.new_event() for _ in range(pieces)]
        self._plan: PassPlan | None = None
        self._copied = self._taken = 0  # pieces of this pass whose copy, whose reading is enqueued

    def follow(self, places: Index, addresses: Addresses) -> PassPlan:
        """Plan passes for rows that lie there; see `plan_pass`. A pass under way is over.

        Copies of it may still run: into pieces of the ring that nothing reads before it is filled anew.
        """
        self._plan = plan_pass(
            places, addresses, self.row_bytes, ring=self.address, rows=self.piece_rows, pieces=self.pieces
        )
        self._copied = self._taken = 0
        return self._plan

    def begin(self, layer: int = 0) -> None:
        """Start a pass at a layer: as much is copied as the ring holds."""
        assert self._plan is not None
        self._copied = self._taken = self._plan.first[layer]
        self._copy_on()

    def expects(self, layer: int) -> bool:
        """Whether the pass goes on with this layer."""
        return self._plan is not None and self._taken == self._plan.first[layer] < self._copied

    def parts(self, layer: int, stream: int) -> Iterator[tuple[int, int]]:
        """The layer's positions in parts, [begin, end): what is in device memory, then piece by piece.

        `stream` waits for a piece before it is handed out. What reads it must be enqueued there before the next is taken.
        """
        assert self._plan is not None
        plan, driver = self._plan, self.driver
        if plan.resident[layer]:
            yield 0, plan.resident[layer]
        for piece in plan.pieces[plan.first[layer] : plan.first[layer + 1]]:
            driver.stream_wait(stream, self._filled[piece.slot])
            try:
                yield piece.begin, piece.end
            finally:
                driver.record(self._read[piece.slot], stream)
            self._taken += 1
            self._copy_on()

    def close(self) -> None:
        """Free the memory. No kernel may still read it."""
        self.driver.synchronize(self._copies)
        self.driver.deallocate(self.address)

    def _copy_on(self) -> None:
        """Enqueue copies until the ring is full of what is not read yet."""
        assert self._plan is not None
        upcoming = self._plan.pieces[self._copied : self._taken + self.pieces]
        for piece in upcoming:
            self.driver.stream_wait(self._copies, self._read[piece.slot])
            for nbytes in np.unique(piece.nbytes).tolist():
                alike = piece.nbytes == nbytes
                self.driver.copy(piece.to[alike], piece.source[alike], nbytes, self._copies)
            self.driver.record(self._filled[piece.slot], self._copies)
        self._copied += len(upcoming)
