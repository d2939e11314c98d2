"""Staged host rows: every row is where the kernels look for it when they look, whatever the streams do."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from q38.residency.arena import Arena
from q38.residency.pool import HostLimits, HostPool
from q38.residency.staging import WORTH, Ring, fewest_tokens, plan_pass
from q38.residency.store import RowStore
from q38.residency.table import ENTRY, AddressTable
from tests.residency.fake_driver import FakeDriver

ROW = 32  # bytes
LIMITS = HostLimits(available=2**40, memlock=None)


class Machine:
    """A row store whose rows hold their own number, a ring, and a model that reads every row of a layer."""

    def __init__(self, resident: np.ndarray, *, rows: int, pieces: int, seed: int) -> None:
        layers, experts = resident.shape
        self.layers, self.experts, self.random = layers, experts, random.Random(seed)
        self.driver = FakeDriver(seed=seed)
        pool = HostPool(
            self.driver, ROW, resident.size + 4, scratch=resident.size * ENTRY, limits=LIMITS, keep=0
        )
        arena = Arena(self.driver, resident.size * ROW, chunk=256)
        table = AddressTable(self.driver, pool, layers, experts)
        self.stream = self.driver.new_stream()
        self.store = RowStore(self.driver, pool, arena, table, stream=self.stream, resident=resident)
        self.store.back(int(resident.sum()) + 4)
        for row, address in enumerate(self.store.addresses(self.store.place).tolist()):
            self.driver.bytes_at(address, ROW)[:] = row % 251
        self.store.publish()
        self.ring = Ring(self.driver, ROW, rows, pieces=pieces)
        self.follow()
        self.read: list[tuple[int, int]] = []  # (layer, expert), as kernels come to run

    def follow(self) -> None:
        place = self.store.place.reshape(self.layers, self.experts)
        self.plan = self.ring.follow(place, self.store.addresses(self.store.place).reshape(place.shape))

    def layer(self, layer: int) -> Iterator[tuple[int, int]]:
        """Enqueue a layer's kernels, and let the streams run now and then."""
        addresses = self.plan.addresses[layer].tolist()
        experts = np.argsort(self.plan.positions[layer]).tolist()
        for begin, end in self.ring.parts(layer, self.stream):
            for position in range(begin, end):
                self.driver.launch(
                    self.stream,
                    lambda e=experts[position], a=addresses[position]: self.check(layer, e, a),
                )
            self.idle()
            yield begin, end

    def check(self, layer: int, expert: int, address: int) -> None:
        row = layer * self.experts + expert
        assert (self.driver.bytes_at(address, ROW) == row % 251).all(), f"row {row} is not there"
        self.read.append((layer, expert))

    def idle(self) -> None:
        for stream in self.driver.streams:
            if self.random.random() < 0.4:
                self.driver.advance(stream, self.random.randrange(6))

    def run(self, layers: Iterator[int] | range) -> None:
        for layer in layers:
            if not self.ring.expects(layer):
                self.ring.begin(layer)
            for _ in self.layer(layer):
                pass


def machine_of(layers: int, experts: int, share: float, rows: int, pieces: int, seed: int) -> Machine:
    resident = np.random.default_rng(seed).random((layers, experts)) < share
    return Machine(resident, rows=rows, pieces=pieces, seed=seed)


MACHINES = st.builds(
    machine_of,
    layers=st.integers(1, 5),
    experts=st.integers(1, 9),
    share=st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    rows=st.integers(1, 12),
    pieces=st.integers(1, 4),
    seed=st.integers(0, 2**20),
)


@given(MACHINES, st.integers(1, 3))
def test_kernels_find_every_row_in_pass_after_pass(machine: Machine, passes: int) -> None:
    for _ in range(passes):
        machine.ring.begin()
        machine.run(range(machine.layers))
    machine.driver.advance(machine.stream)
    assert sorted(machine.read) == sorted(
        [(layer, e) for layer in range(machine.layers) for e in range(machine.experts)] * passes
    )


@given(MACHINES, st.data())
def test_rows_may_move_after_a_pass_that_broke_off(machine: Machine, data: st.DataObject) -> None:
    machine.ring.begin()
    stop = data.draw(st.integers(0, machine.layers - 1))
    machine.run(range(stop))
    half = machine.layer(stop)
    next(half)
    half.close()  # an error between two parts of this layer
    rows = np.array(data.draw(st.lists(st.integers(0, machine.store.rows - 1), unique=True, max_size=4)), int)
    machine.store.move(rows, ~machine.store.on_device[rows])
    machine.store.settle()
    machine.read.clear()
    for slot in np.flatnonzero(~machine.store.pool.slots._taken):  # what another row would do to a free slot
        machine.store.pool.row(slot)[:] = 0xEE
    machine.follow()
    machine.run(range(machine.layers))
    machine.driver.advance(machine.stream)
    assert len(machine.read) == machine.store.rows


@given(MACHINES, st.integers(0, 4))
def test_a_pass_may_start_at_any_layer(machine: Machine, layer: int) -> None:
    layer = min(layer, machine.layers - 1)
    machine.run(range(layer, machine.layers))
    machine.run(range(machine.layers))  # nobody said begin
    machine.driver.advance(machine.stream)
    assert len(machine.read) == (2 * machine.layers - layer) * machine.experts


def test_copies_run_ahead_by_what_the_ring_holds_and_no_further() -> None:
    machine = Machine(np.zeros((3, 8), bool), rows=6, pieces=3, seed=0)  # pieces of 2: 4 a layer
    machine.driver.calls.clear()
    machine.ring.begin()
    assert machine.driver.calls.count("copy") == 3
    parts = machine.layer(0)
    for taken in range(4):
        next(parts)
        assert (
            machine.driver.calls.count("copy") == 3 + taken
        )  # the part that is read now still holds its piece
    assert list(parts) == []
    assert machine.driver.calls.count("copy") == 7  # of 12


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**20))
def test_the_plan_names_every_host_row_once(
    layers: int, experts: int, rows: int, pieces: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    places = random.permutation(layers * experts).reshape(layers, experts)
    places = np.where(random.random(places.shape) < 0.5, places, -1 - places)
    addresses = np.where(places >= 0, 10**9 + places * ROW, (-1 - places) * ROW)
    ring = 2 * 10**9
    plan = plan_pass(places, addresses, ROW, ring=ring, rows=rows, pieces=pieces)
    for layer in range(layers):
        assert sorted(plan.positions[layer].tolist()) == list(range(experts))
        lies = dict(zip(plan.positions[layer].tolist(), range(experts), strict=True))
        assert all(places[layer, lies[p]] >= 0 for p in range(plan.resident[layer]))
        for p in range(plan.resident[layer]):
            assert plan.addresses[layer, p] == addresses[layer, lies[p]]
        at = plan.resident[layer]
        for piece in plan.pieces[plan.first[layer] : plan.first[layer + 1]]:
            assert piece.begin == at and 0 < piece.end - at <= rows and 0 <= piece.slot < pieces
            at = piece.end
            copied = {
                int(to) + n: int(source) + n
                for to, source, nbytes in zip(piece.to, piece.source, piece.nbytes, strict=True)
                for n in range(0, int(nbytes), ROW)
            }
            wanted = {
                int(plan.addresses[layer, p]): int(addresses[layer, lies[p]])
                for p in range(piece.begin, piece.end)
            }
            assert copied == wanted
            begin = ring + piece.slot * rows * ROW
            assert all(begin <= to < begin + rows * ROW for to in copied)
            sources = piece.source.tolist()
            ends = (piece.source + piece.nbytes).tolist()
            assert not set(sources) & set(ends), "two copies that are one run"
        assert at == experts
    slots = [piece.slot for piece in plan.pieces]
    assert slots == [n % pieces for n in range(len(slots))]


def test_no_copy_keeps_the_link_for_long() -> None:
    places = -1 - np.arange(20).reshape(1, 20)
    places[0, 7:] -= 3  # two runs, of 7 and 13
    for longest, wanted in ((4 * ROW, [4, 3, 4, 4, 4, 1]), (1, [1] * 20), (100 * ROW, [7, 13])):
        (piece,) = plan_pass(places, (-1 - places) * ROW, ROW, ring=0, rows=20, longest=longest).pieces
        assert (piece.nbytes // ROW).tolist() == wanted
        assert (piece.to[1:] == np.cumsum(piece.nbytes)[:-1]).all()


def test_rows_that_lie_together_are_one_copy() -> None:
    places = -1 - np.arange(64).reshape(1, 64)
    plan = plan_pass(places, (-1 - places) * ROW, ROW, ring=10**6, rows=24, pieces=2)
    assert [len(piece.to) for piece in plan.pieces] == [1, 1, 1]
    assert [int(piece.nbytes[0]) for piece in plan.pieces] == [22 * ROW, 22 * ROW, 20 * ROW]


@pytest.mark.parametrize("top_k", [1, 4])
def test_staging_pays_once_a_step_reads_most_host_rows(top_k: int) -> None:
    random = np.random.default_rng(0)
    heat = random.random((3, 40)) ** 3
    resident = heat > 0.2
    tokens = fewest_tokens(heat, resident, top_k)

    def read(count: int) -> float:
        chosen = np.minimum(top_k * heat / heat.sum(axis=1, keepdims=True), 1)[~resident]
        return float(np.mean(1 - (1 - chosen) ** count))

    assert read(tokens) >= WORTH > read(tokens - 1)


def test_rows_that_nothing_reads_are_never_staged() -> None:
    heat = np.array([[1.0, 1.0, 0.0, 0.0]])
    assert fewest_tokens(heat, heat > 0, 2) == fewest_tokens(heat, np.ones((1, 4), bool), 2) == 2**20
    assert fewest_tokens(np.zeros((2, 4)), np.zeros((2, 4), bool), 4) == 1  # no profile: all alike
