"""How many calibration sequences a host holds.

The residual stream of Qwen4-Exp is hc_count times as wide as the hidden size, so one copy of the block inputs of
S sequences of T tokens takes S T hc_count hidden_size b bytes, b = 2 on a GPU (bfloat16) and 4 on a CPU (float32);
128 x 2048 tokens of the release take 5 GiB on a GPU. A run holds, at its peak,

    caches S T hc_count hidden_size b + (b + 2) x the weights of the largest block of the source + process

where `caches` is 3 for AutoRound (inputs from the source's prefix, from the quantized one, and the outputs) and 2
for the methods that tune each expert alone; the block counts as read and as packed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from q38.base.errors import ResourceError
from q38.base.memory import cgroup_memory
from q38.base.units import GIB, format_bytes
from q38.model.expected import text_tensors
from q38.model.names import LAYERS
from q38.model.shape import ModelShape
from q38.recipe.schema import AUTO_SAMPLES, Recipe

MOST = 128  # sequences that "auto" takes at most: what the published checkpoint was planned with
PROCESS = 3 * GIB  # Python, torch and the libraries
SHARE = 7 / 8  # of the host's memory: 28 of 32 GiB
_CACHES = {"rtn": 0, "autoround": 3}
_CACHES_LOCAL = 2
ITEM_GPU = 2  # bytes of a value of the block inputs: bfloat16; see q38.quantize.torch_state.compute_dtype


@dataclass(frozen=True)
class HostNeed:
    """Bytes of host memory that quantizing takes with `samples` calibration sequences."""

    samples: int
    cache: int
    total: int
    limit: int


def with_samples(
    recipe: Recipe, config: Mapping[str, Any], *, item: int, total: int | None = None, check: bool = True
) -> Recipe:
    """The recipe with its number of calibration sequences settled.

    Args:
        config: config.json of the source.
        item: bytes of a value of the block inputs: 2 on a GPU, 4 on a CPU.
        total: host memory in bytes; default: of this machine, or of the cgroup where that is smaller. It is not
            what happens to be free now, so that a resumed run settles on the same number.
        check: refuse a number that the host does not hold.

    Raises:
        ResourceError: the memory does not hold the number asked for, or not one sequence; names the
            shortfall and the number that fits.
    """
    total = host_memory() if total is None else total
    shape = ModelShape.from_config(config)
    fit = _fitting(recipe, shape, total, item)
    samples = recipe.calibration.samples
    if samples == AUTO_SAMPLES:
        samples = min(fit, MOST)
    need = host_need(recipe, shape, max(samples, 1), total, item)
    if samples < 1 or (check and samples > fit):
        raise ResourceError(
            f"{need.samples} calibration sequences need {format_bytes(need.total)} of host memory,"
            f" {format_bytes(need.limit)} may be taken: {format_bytes(need.total - need.limit)} short",
            where="calibration.samples",
            remedy=f"set it to {fit} or auto"
            if fit
            else "quantize on a host with more memory, or by method rtn",
        )
    calibration = recipe.calibration.model_copy(update={"samples": samples})
    return recipe.model_copy(update={"calibration": calibration})


def cache_bytes(recipe: Recipe, shape: ModelShape, samples: int, item: int) -> int:
    """One copy of the block inputs of `samples` sequences, `item` bytes a value."""
    return samples * recipe.calibration.seqlen * shape.hc_count * shape.hidden_size * item


def host_need(recipe: Recipe, shape: ModelShape, samples: int, total: int, item: int) -> HostNeed:
    """What `samples` sequences take on a host of `total` bytes, `item` bytes a value."""
    cache = cache_bytes(recipe, shape, samples, item)
    method = recipe.quantize.experts.method
    caches = _CACHES.get(method, _CACHES_LOCAL)
    return HostNeed(samples, cache, caches * cache + _fixed(shape, item), int(SHARE * total))


def host_memory() -> int:
    """Bytes of the machine, or of the tightest cgroup."""
    limit, _ = cgroup_memory()
    installed: int = psutil.virtual_memory().total
    return installed if limit is None else min(installed, limit)


def _fitting(recipe: Recipe, shape: ModelShape, total: int, item: int) -> int:
    """Sequences that fit."""
    one = host_need(recipe, shape, 1, total, item)
    fixed = _fixed(shape, item)
    per_sample = one.total - fixed
    if per_sample == 0:  # the method uses no calibration text
        return max(recipe.calibration.samples, MOST)
    return max((one.limit - fixed) // per_sample, 0)


def _fixed(shape: ModelShape, item: int) -> int:
    """Bytes that do not depend on the number of sequences."""
    blocks: Counter[str] = Counter()
    for tensor in text_tensors(shape):
        if tensor.name.startswith(LAYERS):
            blocks[tensor.name[len(LAYERS) + 1 :].partition(".")[0]] += math.prod(tensor.shape)
    return (item + 2) * max(blocks.values()) + PROCESS
