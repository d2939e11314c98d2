"""Contents of a packed checkpoint of random weights, made as fast as a disk takes them.

Nearly every tensor is a window into some megabytes of random values that are made once. What a reader and a router see
is sensible all the same: zero points are the symmetric ones, scales give matrices rows of unit length, and the rows of
a router differ in length, so that some experts are chosen more often than others.

A token chooses expert e when its score, normal with standard deviation s_e, passes a threshold t. For a wanted
frequency p_e = P(score > t) that takes s_e = t / z(1 - p_e), with the quantile z of the normal distribution.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.checkpoint.header import ITEM_BITS
from q38.model.expected import Expected
from q38.model.names import Group, classify, layer_of, module_of
from q38.model.ngram import constants
from q38.model.shape import ModelShape
from q38.residency.synthetic import selection_rates
from q38.synth.tokenizer import BPE_TOKENS
from q38.synth.weights import distribution

_WORDS = 2**25  # bytes of random words that windows are taken from
_FLOATS = 2**22  # random values
_UNUSED = 0.1  # factor on the scores of tokens that the synthetic tokenizer does not write
# Standard deviation of a code less its zero point: codes 1, 2, 2, 3 at 2 bits, any byte at 8.
_CODE_STD = {2: math.sqrt(0.5), 8: 256 / math.sqrt(12)}


class PackedWeights:
    """The bytes of each tensor of one model.

    Args:
        bits: module name -> width, 2, 8 or 16, as `q38.recipe.bits.plan_bits` gives it.
        group_size: input weights that share a scale.
        seed: decides which experts are popular.
    """

    def __init__(self, shape: ModelShape, bits: Mapping[str, int], group_size: int, *, seed: int = 0) -> None:
        self.shape, self.bits, self.group_size, self.seed = shape, bits, group_size, seed
        self.rates = selection_rates(
            layers=shape.num_layers, experts=shape.num_experts, top_k=shape.num_experts_per_tok, seed=seed
        )  # [L, E], selections per token

    def chunks(self, tensor: Expected) -> Iterator[memoryview]:
        """The bytes of a tensor, in pieces. The same name and seed give the same bytes."""
        name, nbytes = tensor.name, math.prod(tensor.shape) * ITEM_BITS[tensor.dtypes[0]] // 8
        if name.endswith(".qweight"):
            yield from _windows(_words(self.bits[module_of(name)]), nbytes, name)
        elif name.endswith(".qzeros"):
            yield from _windows(_zeros(self.bits[module_of(name)]), nbytes, "")
        elif name.endswith(".scales"):
            yield _bytes(self._scales(tensor))
        elif tensor.dtypes[0] == "I64":
            yield _bytes(self._constants(name))
        elif classify(name) is Group.ROUTER:
            yield _bytes(self._router(tensor))
        elif name.endswith("linear_attn.A_log"):
            random = np.random.default_rng(zlib.crc32(name.encode()))
            yield _bytes(to_bf16(np.log(random.uniform(0.01, 16, tensor.shape))))
        else:
            yield from _windows(_normal(*distribution(name, tensor.shape)), nbytes, name)

    def _scales(self, tensor: Expected) -> NDArray[np.float16]:
        """float16 [groups, N]: rows of unit length."""
        module = module_of(tensor.name)
        inputs = tensor.shape[0] * self.group_size
        scale = 1 / math.sqrt(inputs) / _CODE_STD[self.bits[module]]
        scales = np.full(tensor.shape, scale, np.float16)
        if classify(tensor.name) is Group.LM_HEAD:
            scales[:, BPE_TOKENS:] *= np.float16(_UNUSED)
        return scales

    def _router(self, tensor: Expected) -> NDArray[np.uint16]:
        """bfloat16 [experts, hidden], as bits."""
        layer, quantile = layer_of(tensor.name), NormalDist().inv_cdf
        assert layer is not None
        # An expert that nearly every token chooses would need an endless row.
        spread = np.array([1 / quantile(1 - min(rate, 0.4)) for rate in self.rates[layer].tolist()])
        random = np.random.default_rng((self.seed, layer)).standard_normal(tensor.shape, np.float32)
        return to_bf16(random * spread[:, None] / math.sqrt(tensor.shape[1]))

    def _constants(self, name: str) -> NDArray[np.int64]:
        layer = layer_of(name)
        assert self.shape.ngram is not None and layer is not None
        values = constants(self.shape, self.shape.ngram.layer_ids.index(layer))
        return np.array(values[name.rpartition(".")[2]], np.int64)


def to_bf16(values: NDArray[np.floating[Any]]) -> NDArray[np.uint16]:
    """bfloat16 by truncation, as bits."""
    bits: NDArray[np.uint16] = (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(
        np.uint16
    )
    return bits


def _windows(pool: NDArray[np.uint8], nbytes: int, name: str) -> Iterator[memoryview]:
    """`nbytes` of a pool, from a place that the name decides, and around."""
    view = pool.data
    start = zlib.crc32(name.encode()) * 64 % len(pool) if name else 0
    while nbytes > 0:
        piece = view[start : start + nbytes]
        yield piece
        nbytes -= len(piece)
        start = 0


@lru_cache(maxsize=4)
def _words(bits: int) -> NDArray[np.uint8]:
    random = np.random.default_rng(bits)
    if bits == 2:  # each code is 1 plus two coins: 1, 2, 2 or 3, so that the mean weight is zero
        coins = [random.integers(0, 2**32, _WORDS // 4, np.uint32) & 0x55555555 for _ in range(2)]
        return (coins[0] + coins[1] + 0x55555555).view(np.uint8)
    return random.integers(0, 256, _WORDS, np.uint8)


@lru_cache(maxsize=4)
def _zeros(bits: int) -> NDArray[np.uint8]:
    """Stored zero points are less by one."""
    field = 2 ** (bits - 1) - 1
    return np.full(2**16, sum(field << shift for shift in range(0, 8, bits)), np.uint8)


@lru_cache(maxsize=64)
def _normal(centre: float, spread: float) -> NDArray[np.uint8]:
    return to_bf16(centre + spread * _standard_normal()).view(np.uint8)


@lru_cache(maxsize=1)
def _standard_normal() -> NDArray[np.float32]:
    return np.random.default_rng(16).standard_normal(_FLOATS, np.float32)


def _bytes(array: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
