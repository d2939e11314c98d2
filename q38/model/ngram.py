"""Geometry and hash of the n-gram table (PLE).

A token looks up `heads` rows of one table: heads_per_ngram for each n from 2 to ngram_size. Head h
owns the rows [offset_h, offset_h + prime_h); its row for a position is

    (xor over j < n of token[t - j] * multiplier[j]) mod prime_h + offset_h

with int64 wrap-around. Tokens before the start of the text, or before the last eos, count as eos.
Source of the formula: transformers' Qwen4ExpTextNGramEmbedding, checked against it in the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.model.shape import ModelShape, NgramShape

# splitmix64 (Steele, Lea and Flood, 2014)
_GAMMA, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64
_LAYER_STRIDE = 10007  # distance between the seeds of two PLE layers


@lru_cache(maxsize=8)
def head_sizes(shape: NgramShape, index: int = 0) -> tuple[int, ...]:
    """Rows per head of the `index`-th PLE layer: consecutive primes >= vocab_base, numbered through all layers."""
    skip = index * shape.heads
    sizes: list[int] = []
    candidate = shape.vocab_base
    while len(sizes) < skip + shape.heads:
        if _is_prime(candidate):
            sizes.append(candidate)
        candidate += 1
    return tuple(sizes[skip:])


@lru_cache(maxsize=8)
def head_offsets(shape: NgramShape, index: int = 0) -> tuple[int, ...]:
    """First row of each head."""
    return (0, *accumulate(head_sizes(shape, index)[:-1]))


def table_rows(shape: NgramShape, index: int = 0) -> int:
    """Rows of the whole table, padded up to a multiple of the divisor."""
    return -(-sum(head_sizes(shape, index)) // shape.divisor) * shape.divisor


@lru_cache(maxsize=8)
def multipliers(shape: ModelShape, index: int = 0) -> tuple[int, ...]:
    """Odd multipliers of the hash, one per position of the n-gram, drawn from the seed by splitmix64.

    Each is small enough that token id * multiplier stays below 2^63.
    """
    ngram = _ngram(shape)
    bound = max(1, (2**63 - 1) // max(shape.vocab_size, 1) // 2)
    seed = ngram.seed + _LAYER_STRIDE * index
    return tuple(2 * (_splitmix64(seed + _GAMMA * (j + 1)) % bound) + 1 for j in range(ngram.ngram_size))


def constants(shape: ModelShape, index: int = 0) -> dict[str, tuple[int, ...]]:
    """The int64 tensors that a checkpoint keeps beside the table, by the last part of their names."""
    ngram = _ngram(shape)
    return {
        "layer_multipliers": multipliers(shape, index),
        "ngram_heads_vocab_sizes": head_sizes(ngram, index),
        "ngram_heads_offsets": head_offsets(ngram, index),
    }


def row_ids(tokens: NDArray[np.int64], shape: ModelShape, index: int = 0) -> NDArray[np.int64]:
    """The table rows that each token looks up.

    Args:
        tokens: int64 [..., T], whole texts from their first token on (a CPU tensor's `.numpy()` will do).
        shape: a model with an n-gram table and an eos token.
        index: which PLE layer, counted from zero in layer order.

    Returns:
        int64 [..., T, heads].
    """
    ngram = _ngram(shape)
    if shape.eos_token_id is None:
        raise InputError(
            "text_config.eos_token_id is missing", remedy="the n-gram hash needs it; restore config.json"
        )
    shifted = [_shift(tokens, j, shape.eos_token_id) for j in range(ngram.ngram_size)]
    factors, sizes, offsets = multipliers(shape, index), head_sizes(ngram, index), head_offsets(ngram, index)
    mixed = shifted[0] * np.int64(factors[0])  # [..., T]
    heads = []
    for n in range(2, ngram.ngram_size + 1):
        mixed = mixed ^ (shifted[n - 1] * np.int64(factors[n - 1]))
        first = (n - 2) * ngram.heads_per_ngram
        span = slice(first, first + ngram.heads_per_ngram)
        heads.append(np.remainder(mixed[..., None], np.array(sizes[span])) + np.array(offsets[span]))
    return np.concatenate(heads, axis=-1)


def last_row_ids(tokens: Sequence[int], shape: ModelShape, index: int = 0) -> list[int]:
    """`row_ids` of the last token alone, in plain Python: one token a step is too little for arrays.

    Args:
        tokens: the last `ngram_size` tokens of a text, or all of a shorter one.
    """
    ngram = _ngram(shape)
    eos = shape.eos_token_id
    assert eos is not None
    factors, sizes, offsets = multipliers(shape, index), head_sizes(ngram, index), head_offsets(ngram, index)
    mixed, rows, open_text = tokens[-1] * factors[0], [], True
    for n in range(2, ngram.ngram_size + 1):
        token = tokens[-n] if open_text and n <= len(tokens) else eos
        open_text = open_text and token != eos
        mixed ^= token * factors[n - 1]
        for head in range((n - 2) * ngram.heads_per_ngram, (n - 1) * ngram.heads_per_ngram):
            rows.append(mixed % sizes[head] + offsets[head])
    return rows


def _shift(tokens: NDArray[np.int64], by: int, eos: int) -> NDArray[np.int64]:
    """tokens[t - by]; eos where that lies before the start, or at or before an earlier eos."""
    if by == 0:
        return tokens
    positions = np.arange(tokens.shape[-1])
    last_eos = np.maximum.accumulate(np.where(tokens == eos, positions, -1), axis=-1)
    before = np.concatenate([np.full_like(last_eos[..., :1], -1), last_eos[..., :-1]], axis=-1)
    moved = np.take(tokens, np.maximum(positions - by, 0), axis=-1)
    return np.where(positions - by > before, moved, np.int64(eos))


def _ngram(shape: ModelShape) -> NgramShape:
    if shape.ngram is None:
        raise InputError(
            "the model has no n-gram table", where="config.json", remedy="check text_config.ple_layer_ids"
        )
    return shape.ngram


def _splitmix64(state: int) -> int:
    z = (state + _GAMMA) % _WORD
    z = (z ^ (z >> 30)) * _MIX_1 % _WORD
    z = (z ^ (z >> 27)) * _MIX_2 % _WORD
    return z ^ (z >> 31)


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
