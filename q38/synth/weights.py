"""Initial weights of the tiny model, one random stream per tensor."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from q38.model.expected import Expected
from q38.model.names import LAYERS
from q38.model.ngram import head_offsets, head_sizes, multipliers
from q38.model.shape import ModelShape

if TYPE_CHECKING:
    import torch


def initial_tensor(spec: Expected, config: Mapping[str, Any], seed: int) -> torch.Tensor:
    """One tensor of the bf16 layout: bfloat16, or int64 for the n-gram constants.

    The stream depends on the seed and the name alone and is numpy's, so that the bytes depend neither
    on the order of tensors nor on threads, vector units or the version of torch.
    """
    import numpy as np
    import torch

    name = spec.name
    if spec.dtypes[0] == "I64":
        return _ngram_constant(name, config)
    entropy = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    random = np.random.Generator(np.random.PCG64(entropy))
    if name.endswith("linear_attn.A_log"):
        values = np.log(random.uniform(0.01, 16, spec.shape))  # decay rates as transformers draws them
    else:
        centre, spread = distribution(name, spec.shape)
        values = centre + spread * random.standard_normal(spec.shape, dtype=np.float32)
    return torch.from_numpy(values.astype(np.float32)).to(torch.bfloat16)


def distribution(name: str, shape: tuple[int, ...]) -> tuple[float, float]:
    """Mean and standard deviation. No tensor is constant, so that none can be lost unnoticed."""
    if name.endswith("linear_attn.dt_bias") or name.endswith("linear_attn.norm.weight"):
        return 1.0, 0.05
    if ".visual." in name and "norm" in name and name.endswith(".weight"):
        return 1.0, 0.05
    if name.endswith(".bias"):
        return 0.0, 0.02
    if len(shape) == 1:
        return 0.0, 0.05  # RMSNorm multiplies by 1 + weight
    if ".conv1d." in name:
        return 0.0, 1 / math.sqrt(shape[-1])
    if "embed" in name:
        return 0.0, 0.1 if "ngram" in name else 0.5
    if ".block_inject_weight." in name or "input_mix_weight_up" in name:
        return 0.0, 0.5 / math.sqrt(shape[-1])
    fan_in = math.prod(shape[1:]) if ".patch_embed." in name else shape[-1]
    return 0.0, 1 / math.sqrt(fan_in)


def _ngram_constant(name: str, config: Mapping[str, Any]) -> torch.Tensor:
    import torch

    shape = ModelShape.from_config(config)
    assert shape.ngram is not None
    index = shape.ngram.layer_ids.index(int(name.removeprefix(LAYERS + ".").split(".")[0]))
    values = {
        "layer_multipliers": multipliers(shape, index),
        "ngram_heads_vocab_sizes": head_sizes(shape.ngram, index),
        "ngram_heads_offsets": head_offsets(shape.ngram, index),
    }[name.rpartition(".")[2]]
    return torch.tensor(values, dtype=torch.int64)
