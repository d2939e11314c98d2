"""The packed layout of AutoRound's "auto_round:auto_gptq" format (GPTQ v1 without g_idx).

One rule for every width: word w of column n holds bits [32w, 32w + 32) of the LSB-first
concatenation of that column's codes along K. Zero points are packed by the same rule along N and
store zero - 1. A matrix [N out, K in] in groups of g becomes

    qweight  int32   [K * bits / 32, N]
    qzeros   int32   [K / g, N * bits / 32]
    scales   float16 [K / g, N]          signed: a negative scale is valid

    w[n, k] = (code[k, n] - (stored_zero[k // g, n] + 1)) * scale[k // g, n]

A symmetric tensor has zero = 2^(bits-1) everywhere, so the levels are {-2, -1, 0, 1} * scale at 2 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

WIDTHS = (2, 3, 4, 8)
WORD = 32


class PackedMatrix(NamedTuple):
    """The three tensors of one packed matrix; see the module for shapes and dtypes."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes along the first dimension.

    Args:
        codes: uint8 [K, N], each below 2^bits.
        bits: 2, 3, 4 or 8.

    Returns:
        int32 [K * bits / 32, N].

    Raises:
        ValueError: another width, K does not fill whole words, or a code does not fit.
    """
    import torch

    k, n = codes.shape
    _check(k, bits)
    if bits == 8:  # four bytes are a word as they lie in memory
        flat = codes.t().contiguous().view(-1)
        flat = flat.clone() if flat.storage_offset() % 4 else flat
        return flat.view(torch.int32).view(n, -1).t().contiguous()
    if codes.numel() and int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit in {bits} bits")
    period, words = _period(bits)
    blocks = codes.view(-1, period, n)  # [K / period, period, N] uint8
    packed = torch.zeros(blocks.shape[0], words, n, dtype=torch.int64, device=codes.device)
    for i, word, shift, spill in _fields(bits):
        code = blocks[:, i].to(torch.int64)
        packed[:, word] |= (code << shift) & 0xFFFFFFFF
        if spill:
            packed[:, word + 1] |= code >> (bits - spill)
    return packed.view(-1, n).to(torch.int32)  # keeps the low 32 bits


def unpack(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """The inverse of `pack`.

    Args:
        words: int32 [K * bits / 32, N].
        bits: 2, 3, 4 or 8.
        k: K, the number of codes per column.

    Returns:
        uint8 [K, N].

    Raises:
        ValueError: another width, or `words` does not hold K codes.
    """
    import torch

    _check(k, bits)
    if words.shape[0] * WORD != k * bits:
        raise ValueError(f"{words.shape[0]} words do not hold {k} codes of {bits} bits")
    n = words.shape[1]
    period, per_block = _period(bits)
    blocks = words.view(-1, per_block, n)  # [K / period, words, N] int32
    codes = torch.empty(blocks.shape[0], period, n, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for i, word, shift, spill in _fields(bits):
        code = blocks[:, word] >> shift  # arithmetic shift: the mask drops the sign bits
        if spill:
            low = (1 << (bits - spill)) - 1
            code = (code & low) | (blocks[:, word + 1] << (bits - spill))
        codes[:, i] = (code & mask).to(torch.uint8)
    return codes.view(k, n)


def pack_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack zero points, stored as zero - 1.

    Args:
        zeros: [G, N] of any integer dtype, values 1 to 2^bits.
        bits: 2, 3, 4 or 8.

    Returns:
        int32 [G, N * bits / 32].

    Raises:
        ValueError: another width, N does not fill whole words, or a zero point is out of range.
    """
    import torch

    stored = zeros.to(torch.int64) - 1
    if stored.numel() and not 0 <= int(stored.min()) <= int(stored.max()) < 1 << bits:
        raise ValueError(f"a zero point is outside 1..{1 << bits}: the layout stores zero - 1")
    return pack(stored.to(torch.uint8).t().contiguous(), bits).t().contiguous()


def unpack_zeros(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Zero points int32 [G, N] from int32 [G, N * bits / 32]: the stored value plus one."""
    import torch

    n = words.shape[1] * WORD // bits
    return unpack(words.t().contiguous(), bits, n).t().to(torch.int32) + 1


def symmetric_zero(bits: int) -> int:
    """The zero point of a symmetric tensor: 2 at 2 bits, 128 at 8 bits."""
    return 1 << (bits - 1)


def symmetric_zeros(groups: int, n: int, bits: int) -> torch.Tensor:
    """qzeros of a symmetric tensor: int32 [groups, n * bits / 32] (0x55555555 at 2 bits, 0x7F7F7F7F at 8)."""
    import torch

    return pack_zeros(torch.full((groups, n), symmetric_zero(bits)), bits)


def dequantize(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """The weights that a packed matrix stands for.

    Args:
        qweight: int32 [K * bits / 32, N].
        qzeros: int32 [G, N * bits / 32].
        scales: float16 or float32 [G, N].
        bits: 2, 3, 4 or 8.

    Returns:
        float32 [N, K]; rounded to bfloat16 it equals AutoRound's own fake-quantized weight.

    Raises:
        ValueError: the three shapes do not belong together.
    """
    import torch

    k, n = qweight.shape[0] * WORD // bits, qweight.shape[1]
    groups = scales.shape[0]
    if scales.shape != (groups, n) or qzeros.shape != (groups, n * bits // WORD) or k % groups:
        raise ValueError(
            f"qweight {list(qweight.shape)}, qzeros {list(qzeros.shape)} and scales {list(scales.shape)} "
            f"do not belong together at {bits} bits"
        )
    zeros, scale = (
        t.t().contiguous().to(torch.float32).unsqueeze(-1) for t in (unpack_zeros(qzeros, bits), scales)
    )  # [N, G, 1]
    weight = _rows(qweight, bits, k).view(n, groups, k // groups)
    return weight.sub_(zeros).mul_(scale).view(n, k)


def _rows(words: torch.Tensor, bits: int, k: int) -> torch.Tensor:
    """Codes as float32 [N, K] from int32 [K * bits / 32, N]: one look-up a byte where bytes hold whole codes."""
    import torch

    if 8 % bits:
        return unpack(words, bits, k).t().contiguous().to(torch.float32)
    data = words.t().contiguous().view(-1).view(torch.uint8)  # [N * K * bits / 8], little-endian
    if bits == 8:
        return data.to(torch.float32)
    # The codes of a byte as one value of as many bytes: PyTorch gathers single values much faster than short rows.
    table = torch.arange(256, device=words.device)[:, None] >> torch.arange(0, 8, bits, device=words.device)
    codes = (table & ((1 << bits) - 1)).to(torch.float32)  # [256, 8 / bits]
    joined = codes.view(torch.complex128 if bits == 2 else torch.complex64).view(-1)
    return joined.index_select(0, data.to(torch.int32)).view(torch.float32)


def codes_per_step(bits: int) -> int:
    """K must be a multiple of this for the codes to fill whole words: 16, 32, 8, 4 at 2, 3, 4, 8 bits."""
    return _period(bits)[0]


def _check(k: int, bits: int) -> None:
    if bits not in WIDTHS:
        raise ValueError(f"{bits} bits: the layout has the widths {WIDTHS}")
    if k % codes_per_step(bits):
        raise ValueError(f"{k} codes of {bits} bits do not fill whole 32-bit words")


def _period(bits: int) -> tuple[int, int]:
    """Codes and words after which the bit pattern repeats: (32, 3) at 3 bits, else (32 / bits, 1)."""
    common = math.gcd(WORD, bits)
    return WORD // common, bits // common


def _fields(bits: int) -> Iterator[tuple[int, int, int, int]]:
    """(code, word, shift, bits that spill into the next word) for each code of one period."""
    for i in range(_period(bits)[0]):
        word, shift = divmod(i * bits, WORD)
        yield i, word, shift, max(0, shift + bits - WORD)
