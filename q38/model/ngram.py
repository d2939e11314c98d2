"""Geometry and hash of the n-gram table (PLE).

A token looks up `heads` rows of one table: heads_per_ngram for each n from 2 to ngram_size. Head h
owns the rows [offset_h, offset_h + prime_h); its row for a position is

    (xor over j < n of token[t - j] * multiplier[j]) mod prime_h + offset_h

with int64 wrap-around. Tokens before the start of the text, or before the last eos, count as eos.
Source of the formula: transformers' Qwen4ExpTextNGramEmbedding, checked against it in the tests.
"""

from __future__ import annotations

from functools import lru_cache

from q38.model.shape import NgramShape


@lru_cache(maxsize=8)
def head_sizes(shape: NgramShape) -> tuple[int, ...]:
    """Rows per head: the first `heads` primes >= vocab_base."""
    sizes: list[int] = []
    candidate = shape.vocab_base
    while len(sizes) < shape.heads:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    return tuple(sizes)


def head_offsets(shape: NgramShape) -> tuple[int, ...]:
    """First row of each head."""
    offsets, position = [], 0
    for size in head_sizes(shape):
        offsets.append(position)
        position += size
    return tuple(offsets)


def table_rows(shape: NgramShape) -> int:
    """Rows of the whole table, padded up to a multiple of the divisor."""
    return -(-sum(head_sizes(shape)) // shape.divisor) * shape.divisor


def _is_prime(n: int) -> bool:
    if n < 2:
        return False
    if n % 2 == 0:
        return n == 2
    divisor = 3
    while divisor * divisor <= n:
        if n % divisor == 0:
            return False
        divisor += 2
    return True
