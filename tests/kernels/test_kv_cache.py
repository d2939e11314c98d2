"""Quantized KV rows: kernels bit for bit against the references, and the ring's ownership rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.kernels.kv_formats import dequantize_reference, quantize_reference
from q38.model.kv_format import INT4_G32, INT8_G64, KvFormat

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
from q38.kernels.kv_cache import KvTiers, gather_rows, gather_rows_tiered, write_rows, write_rows_tiered

HEADS, DIM = 2, 128
FORMATS = pytest.mark.parametrize("kv", [INT8_G64, INT4_G32], ids=lambda kv: kv.name)


def hard_rows() -> torch.Tensor:
    """Ties, zeros, tiny, huge and ordinary values: float32 [6, heads, dim]."""
    rows = torch.randn(6, HEADS, DIM, generator=torch.Generator().manual_seed(0)) * 3
    rows[0, 0, :64] = 0
    rows[1] *= 1e6  # the scale of int8 would pass the fp16 maximum
    rows[2] *= 1e-9  # the scale rounds to zero in fp16
    rows[3] = torch.arange(DIM) * 0.5 - 20  # exact halves
    rows[4] = 0
    rows[4, :, 5] = 127 * 2.0**-14  # a subnormal fp16 scale
    return rows


@FORMATS
def test_written_rows_match_the_reference_bit_for_bit(device: str, kv: KvFormat) -> None:
    rows, slots = hard_rows().to(device), torch.tensor([3, 9, 1, 0, 5, -1], device=device)
    payload, scales = kv.payload(12, HEADS, DIM, device), kv.scales(12, HEADS, DIM, device)
    write_rows(rows, slots, payload, scales, kv)
    expected, expected_scales = quantize_reference(rows, kv)
    assert torch.equal(payload[slots[:5]], expected[:5])
    assert torch.equal(scales[slots[:5]], expected_scales[:5])
    untouched = [i for i in range(12) if i not in slots.tolist()]
    assert not payload[untouched].any() and bool((scales[untouched] == 1).all())
    assert bool(scales.isfinite().all())


@FORMATS
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_gathered_rows_match_the_reference_bit_for_bit(device: str, kv: KvFormat, dtype: torch.dtype) -> None:
    rows = hard_rows().to(device)[[0, 2, 3, 4, 5]]
    payload, scales = quantize_reference(rows, kv)
    slots = torch.tensor([4, 0, -1, 2], dtype=torch.int32, device=device)
    out = torch.full((4, HEADS, DIM), 7.0, dtype=dtype, device=device)
    gather_rows(slots, payload, scales, kv, out)
    expected = dequantize_reference(payload, scales, kv, dtype)
    assert torch.equal(out[[0, 1, 3]], expected[[4, 0, 2]])
    assert bool((out[2] == 7).all())


@given(st.lists(st.integers(0, 63), min_size=1, max_size=8, unique=True))
@settings(max_examples=5, deadline=None)
def test_a_slot_reads_int8_while_it_owns_its_place_and_int4_after(device: str, slots: list[int]) -> None:
    tiers = KvTiers(64, HEADS, DIM, 8, device=device)
    rows = torch.randn(len(slots), HEADS, DIM).to(device)
    at = torch.tensor(slots, device=device)
    write_rows_tiered(rows, at, tiers)
    out = gather_rows_tiered(at, tiers, torch.empty(len(slots), HEADS, DIM, device=device))
    owners = tiers.owner.tolist()
    for i, slot in enumerate(slots):
        kv = INT8_G64 if owners[slot % 8] == slot else INT4_G32
        payload, scales = quantize_reference(rows[i : i + 1], kv)
        assert torch.equal(out[i], dequantize_reference(payload, scales, kv, out.dtype)[0])
    for place in {s % 8 for s in slots}:  # of the slots that meet at a place, one owns it
        assert owners[place] in [s for s in slots if s % 8 == place]


def test_a_later_write_takes_the_place_and_the_earlier_slot_falls_back_to_int4(device: str) -> None:
    tiers = KvTiers(64, HEADS, DIM, 8, device=device)
    first, second = torch.randn(2, 1, HEADS, DIM).to(device)
    write_rows_tiered(first, torch.tensor([3], device=device), tiers)
    write_rows_tiered(second, torch.tensor([11], device=device), tiers)
    out = gather_rows_tiered(
        torch.tensor([3, 11], device=device), tiers, torch.empty(2, HEADS, DIM, device=device)
    )
    assert torch.equal(
        out[0], dequantize_reference(*quantize_reference(first, INT4_G32), INT4_G32, out.dtype)[0]
    )
    assert torch.equal(
        out[1], dequantize_reference(*quantize_reference(second, INT8_G64), INT8_G64, out.dtype)[0]
    )


def test_more_rows_than_the_ring_has_places_are_refused(device: str) -> None:
    tiers = KvTiers(64, HEADS, DIM, 8, device=device)
    with pytest.raises(InputError, match="ring of 8"):
        write_rows_tiered(torch.zeros(9, HEADS, DIM), torch.arange(9), tiers)


@FORMATS
def test_the_error_of_a_format_is_what_its_bits_allow(kv: KvFormat) -> None:
    rows = torch.randn(64, HEADS, DIM, generator=torch.Generator().manual_seed(1))
    back = dequantize_reference(*quantize_reference(rows, kv), kv, torch.float32)
    assert float((back - rows).norm() / rows.norm()) < (0.008 if kv.bits == 8 else 0.12)
