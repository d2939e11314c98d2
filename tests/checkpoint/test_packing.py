"""The packed layout: its rule, its inverse, and the constants that loaders check for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.checkpoint.packing import (
    WIDTHS,
    codes_per_step,
    dequantize,
    pack,
    pack_zeros,
    symmetric_zero,
    symmetric_zeros,
    unpack,
    unpack_zeros,
)

widths = pytest.mark.parametrize("bits", WIDTHS)


def random_codes(k: int, n: int, bits: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << bits, (k, n), generator=generator, dtype=torch.uint8)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from(WIDTHS), steps=st.integers(1, 9), n=st.integers(1, 7), seed=st.integers(0, 2**32 - 1)
)
def test_unpack_inverts_pack_and_pack_inverts_unpack(bits: int, steps: int, n: int, seed: int) -> None:
    codes = random_codes(steps * codes_per_step(bits), n, bits, seed)
    words = pack(codes, bits)
    assert torch.equal(unpack(words, bits, codes.shape[0]), codes)
    assert torch.equal(pack(unpack(words, bits, codes.shape[0]), bits), words)


@settings(deadline=None, max_examples=30)
@given(bits=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32 - 1))
def test_a_word_holds_32_bits_of_the_lsb_first_concatenation_along_k(bits: int, seed: int) -> None:
    codes = random_codes(64, 3, bits, seed)
    words = pack(codes, bits)
    for n in range(3):
        stream = sum(int(c) << (bits * k) for k, c in enumerate(codes[:, n]))
        expected = [(stream >> (32 * w)) & 0xFFFFFFFF for w in range(64 * bits // 32)]
        assert [int(w) & 0xFFFFFFFF for w in words[:, n]] == expected


@widths
def test_shapes_and_dtypes_are_those_of_the_format(bits: int) -> None:
    words = pack(random_codes(256, 128, bits, 0), bits)
    assert words.dtype == torch.int32 and words.shape == (256 * bits // 32, 128)
    assert symmetric_zeros(2, 128, bits).shape == (2, 128 * bits // 32)


@pytest.mark.parametrize(("bits", "word"), [(2, 0x55555555), (4, 0x77777777), (8, 0x7F7F7F7F)])
def test_a_symmetric_zero_point_is_stored_as_zero_minus_one(bits: int, word: int) -> None:
    assert set(symmetric_zeros(3, 32, bits).flatten().tolist()) == {word}
    assert set(unpack_zeros(symmetric_zeros(3, 32, bits), bits).flatten().tolist()) == {symmetric_zero(bits)}


@settings(deadline=None, max_examples=30)
@given(bits=st.sampled_from(WIDTHS), seed=st.integers(0, 2**32 - 1))
def test_zero_points_survive_a_round_trip(bits: int, seed: int) -> None:
    zeros = random_codes(3, 64, bits, seed).to(torch.int32) + 1
    assert torch.equal(unpack_zeros(pack_zeros(zeros, bits), bits), zeros)


@widths
def test_dequantize_follows_its_formula_with_negative_scales(bits: int) -> None:
    k, n, group = 128, 32, 64
    codes, zeros = random_codes(k, n, bits, 1), random_codes(k // group, n, bits, 2).to(torch.int32) + 1
    scales = torch.randn(k // group, n, generator=torch.Generator().manual_seed(3)).to(torch.float16)
    weight = dequantize(pack(codes, bits), pack_zeros(zeros, bits), scales, bits)
    assert weight.shape == (n, k) and weight.dtype == torch.float32
    for column, row in [(0, 0), (5, 63), (31, 64), (7, 127)]:
        group_of = row // group
        level = int(codes[row, column]) - int(zeros[group_of, column])
        assert weight[column, row].item() == level * scales[group_of, column].float().item()


@settings(deadline=None, max_examples=40)
@given(bits=st.sampled_from(WIDTHS), groups=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_dequantize_gives_the_bits_of_the_formula_on_unpacked_codes(
    bits: int, groups: int, seed: int
) -> None:
    n, size = 32, 32
    codes, zeros = (
        random_codes(groups * size, n, bits, seed),
        random_codes(groups, n, bits, seed ^ 1).int() + 1,
    )
    scales = torch.randn(groups, n, generator=torch.Generator().manual_seed(seed)).to(torch.float16)
    level = codes.view(groups, size, n).float() - zeros.float()[:, None]  # [G, g, N]
    wanted = (level * scales.float()[:, None]).view(-1, n).t()
    assert torch.equal(dequantize(pack(codes, bits), pack_zeros(zeros, bits), scales, bits), wanted)


@widths
def test_a_part_of_the_columns_dequantizes_as_it_does_in_the_whole(bits: int) -> None:
    matrix = pack(random_codes(64, 96, bits, 4), bits), symmetric_zeros(2, 96, bits)
    scales = torch.randn(2, 96, generator=torch.Generator().manual_seed(5)).to(torch.float16)
    whole = dequantize(*matrix, scales, bits)
    part = dequantize(matrix[0][:, 32:64], symmetric_zeros(2, 32, bits), scales[:, 32:64], bits)
    assert torch.equal(part, whole[32:64])


def test_two_bit_levels_are_minus_two_to_one_times_the_scale() -> None:
    codes = torch.arange(4, dtype=torch.uint8).repeat(4)[:, None].repeat(1, 16)  # [16, 16]
    weight = dequantize(pack(codes, 2), symmetric_zeros(1, 16, 2), torch.full((1, 16), 0.5), 2)
    assert weight[0, :4].tolist() == [-1.0, -0.5, 0.0, 0.5]


def test_a_code_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit in 2 bits"):
        pack(torch.full((16, 1), 4, dtype=torch.uint8), 2)


@widths
def test_a_length_that_does_not_fill_words_is_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="whole 32-bit words"):
        pack(torch.zeros(codes_per_step(bits) + 1, 1, dtype=torch.uint8), bits)


def test_another_width_is_refused() -> None:
    with pytest.raises(ValueError, match="5 bits"):
        pack(torch.zeros(32, 1, dtype=torch.uint8), 5)


def test_words_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match="do not hold 32 codes"):
        unpack(torch.zeros(3, 4, dtype=torch.int32), 2, 32)


@pytest.mark.parametrize("zero", [0, 5])
def test_a_zero_point_without_a_stored_form_is_refused(zero: int) -> None:
    with pytest.raises(ValueError, match=r"outside 1\.\.4"):
        pack_zeros(torch.full((1, 16), zero), 2)


def test_parts_of_different_tensors_are_refused() -> None:
    with pytest.raises(ValueError, match="do not belong together"):
        dequantize(pack(random_codes(64, 16, 2, 0), 2), symmetric_zeros(2, 16, 2), torch.ones(1, 16), 2)
