"""A pool's rows against the references, on whatever device is here: bit for bit, with an independent model of the ring."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from q38.kernels import kv_reference
from q38.kernels.kv_formats import dequantize_reference, quantize_reference
from q38.kvcache.layout import ROWS, SIDES, TIERED, KvLayout
from q38.kvcache.pool import KvPool, distinct, gather_many
from q38.model.kv_format import INT4_G32, INT8_G64, KvFormat

HEADS, DIM = 2, 64


def make(name: str, slots: int = 32, *, ring: int = 8, layers: int = 2) -> KvPool:
    return KvPool(KvLayout(name, layers, HEADS, DIM, ring if name == TIERED else 0), slots)


def rows(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, n, HEADS, DIM, generator=generator).mul(3).to(torch.bfloat16)
    return k, v


def rounded(x: torch.Tensor, kv: KvFormat | None, dtype: torch.dtype) -> torch.Tensor:
    if kv is None:
        return x.to(torch.float8_e4m3fn).to(dtype)
    return dequantize_reference(*quantize_reference(x, kv), kv, dtype)


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_comes_back_rounded_once(name: str, dtype: torch.dtype) -> None:
    pool, (k, v) = make(name), rows(4)
    slots = torch.tensor([3, 17, 30, 12])
    pool.write(1, slots, k, v)
    best = INT8_G64 if name == TIERED else ROWS[name]
    for side, written in zip(SIDES, (k, v), strict=True):
        out = torch.full((4, HEADS, DIM), 7.0, dtype=dtype)
        assert pool.gather(1, side, slots, out) is out
        assert torch.equal(out, rounded(written, best, dtype))
    untouched = torch.empty(4, HEADS, DIM)
    assert not pool.gather(0, "k", slots, untouched).any()  # another layer


@pytest.mark.parametrize("name", list(ROWS))
def test_a_negative_slot_is_neither_written_nor_read(name: str) -> None:
    pool, (k, v) = make(name), rows(3)
    pool.write(0, torch.tensor([-1, 5, -7]), k, v)
    out = torch.full((3, HEADS, DIM), 7.0)
    pool.gather(0, "v", torch.tensor([-1, 5, 6]), out)
    assert bool((out[0] == 7).all()) and bool(out[1].any()) and not out[2].any()


@pytest.mark.parametrize("name", list(ROWS))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots_may_have_either_width_and_rows_any_stride(name: str, dtype: torch.dtype) -> None:
    pool, (k, v) = make(name), rows(6)
    slots = torch.tensor([1, 2, 3], dtype=dtype)
    pool.write(0, slots, k[::2], v.transpose(0, 1).contiguous().transpose(0, 1)[1::2])
    expected = make(name)
    expected.write(0, slots.long(), k[::2].contiguous(), v[1::2].contiguous())
    for side in SIDES:
        a, b = torch.empty(2, 3, HEADS, DIM)
        assert torch.equal(pool.gather(0, side, slots, a), expected.gather(0, side, slots, b))


def test_fp8_holds_what_passes_its_limit_as_the_limit() -> None:
    pool = make("fp8")
    k = torch.full((1, HEADS, DIM), 1e6)
    pool.write(0, torch.tensor([1]), k, -k)
    out = torch.empty(1, HEADS, DIM)
    assert pool.gather(0, "k", torch.tensor([1]), out).unique().tolist() == [448.0]
    assert pool.gather(0, "v", torch.tensor([1]), out).unique().tolist() == [-448.0]


def test_more_rows_than_the_ring_go_in_by_pieces_and_the_last_ones_own_it() -> None:
    pool, (k, v) = make(TIERED, 64, ring=8), rows(20)
    slots = torch.arange(10, 30)
    pool.write(0, slots, k, v)
    out = pool.gather(0, "k", slots, torch.empty(20, HEADS, DIM))
    assert torch.equal(out[12:], rounded(k[12:], INT8_G64, torch.float32))
    assert torch.equal(out[:12], rounded(k[:12], INT4_G32, torch.float32))


def test_a_row_that_lost_its_place_does_not_write_the_ring() -> None:
    """Of slots 3 and 11 the earlier one won, as it may in a parallel launch."""
    new = rows(2)[0]
    ring = (
        INT8_G64.payload(8, HEADS, DIM, "cpu"),
        INT8_G64.scales(8, HEADS, DIM, "cpu"),
        torch.full((8,), -1).int(),
    )
    ring[2][3] = 3
    payload, scales = INT4_G32.payload(16, HEADS, DIM, "cpu"), INT4_G32.scales(16, HEADS, DIM, "cpu")
    kv_reference.write_rows(new, torch.tensor([3, 11]), payload, scales, INT4_G32, ring, stamp=False)
    out = kv_reference.gather_rows(
        torch.tensor([3, 11]), payload, scales, INT4_G32, torch.empty(2, HEADS, DIM), ring
    )
    assert torch.equal(out[0], rounded(new[0], INT8_G64, torch.float32))
    assert torch.equal(out[1], rounded(new[1], INT4_G32, torch.float32))


def test_keys_and_values_of_a_slot_come_from_the_same_tier() -> None:
    pool, (k, v) = make(TIERED, 64, ring=4), rows(4)
    slots = torch.tensor([1, 5, 9, 13])  # one place
    pool.write(0, slots, k, v)
    keys, values = gather_many(pool, 0, slots, torch.float32)
    hot = [
        (
            torch.equal(keys[i], rounded(k[i], INT8_G64, torch.float32)),
            torch.equal(values[i], rounded(v[i], INT8_G64, torch.float32)),
        )
        for i in range(4)
    ]
    assert sorted(hot) == [(False, False)] * 3 + [(True, True)]


def test_the_first_slots_are_finite_before_anything_was_written() -> None:
    poison = torch.full((32 * HEADS * DIM,), 0xFF, dtype=torch.uint8)
    pool = KvPool(KvLayout("int8", 1, HEADS, DIM), 32, memory=lambda part, n: poison[:n].clone())
    pool.clear_first(4)
    out = pool.gather(0, "k", torch.arange(4), torch.empty(4, HEADS, DIM))
    assert not out.any()
    assert bool(pool.gather(0, "k", torch.tensor([5]), out[:1]).isnan().any())  # and only those


@given(st.lists(st.integers(-2, 12), max_size=20))
def test_distinct_slots_are_found_and_every_slot_finds_itself(slots: list[int]) -> None:
    found, at = distinct(torch.tensor(slots, dtype=torch.int64).view(1, -1))
    assert found.tolist() == sorted({s for s in slots if s >= 0})
    for slot, position in zip(slots, at[0].tolist(), strict=True):
        assert position == -1 if slot < 0 else found[position] == slot


@pytest.mark.parametrize("kv", [INT8_G64, INT4_G32], ids=lambda kv: kv.name)
def test_the_torch_path_matches_the_kernels_bit_for_bit(kv: KvFormat) -> None:
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
    from q38.kernels.kv_cache import KvTiers, gather_rows_tiered, write_rows_tiered

    new, slots = torch.randn(5, HEADS, DIM), torch.tensor([3, 11, 7, -1, 4])  # 3 and 11 meet at a place
    tiers = KvTiers(16, HEADS, DIM, 8, device="cpu")
    write_rows_tiered(new, slots, tiers)
    ring = (
        INT8_G64.payload(8, HEADS, DIM, "cpu"),
        INT8_G64.scales(8, HEADS, DIM, "cpu"),
        tiers.owner.clone(),
    )
    payload, scales = INT4_G32.payload(16, HEADS, DIM, "cpu"), INT4_G32.scales(16, HEADS, DIM, "cpu")
    kv_reference.write_rows(new, slots, payload, scales, INT4_G32, ring, stamp=False)
    assert torch.equal(payload, tiers.payload) and torch.equal(scales, tiers.scales)
    assert torch.equal(ring[0], tiers.ring_payload) and torch.equal(ring[1], tiers.ring_scales)
    a, b = torch.zeros(2, 5, HEADS, DIM)
    kv_reference.gather_rows(slots, payload, scales, INT4_G32, a, ring)
    assert torch.equal(a, gather_rows_tiered(slots, tiers, b))


class RingMachine(RuleBasedStateMachine):
    """Writes of any slots in any order, against a dictionary of what each slot last got."""

    @initialize(ring=st.sampled_from([1, 3, 8, 24]))
    def start(self, ring: int) -> None:
        self.ring = ring
        self.pool = make(TIERED, 24, ring=ring, layers=1)
        self.written: dict[int, torch.Tensor] = {}
        self.seed = 0

    @rule(slots=st.lists(st.integers(0, 23), min_size=1, max_size=30, unique=True))
    def write(self, slots: list[int]) -> None:
        self.seed += 1
        k, v = rows(len(slots), self.seed)
        self.pool.write(0, torch.tensor(slots), k, v)
        self.written |= dict(zip(slots, k, strict=True))

    @rule(places=st.lists(st.integers(0, 23)), owner=st.integers(-1, 23))
    def stamp_without_writing(self, places: list[int], owner: int) -> None:
        """Another slot's stamp costs precision and no more."""
        tiers: Any = self.pool.rows[0]["k"].tiers
        for place in places:
            if owner not in self.written and (owner < 0 or owner % self.ring == place % self.ring):
                tiers.owner[place % self.ring] = owner

    @invariant()
    def every_slot_reads_its_own_last_row_in_one_of_the_two_formats(self) -> None:
        if not self.written:
            return
        slots = sorted(self.written)
        out = self.pool.gather(0, "k", torch.tensor(slots), torch.empty(len(slots), HEADS, DIM))
        tiers: Any = self.pool.rows[0]["k"].tiers
        owner = tiers.owner.tolist()
        for slot, got in zip(slots, out, strict=True):
            kv = INT8_G64 if owner[slot % self.ring] == slot else INT4_G32
            assert torch.equal(got, rounded(self.written[slot], kv, torch.float32))


RingMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=12, deadline=None)
TestRing = RingMachine.TestCase
