"""How many calibration sequences a host holds.

The residual stream of Qwen4-Exp is hc_count times as wide as the hidden size, so one copy of the block inputs of
S sequences of T tokens takes S T hc_count hidden_size 2 bytes (128 x 2048 tokens of the release: 5 GiB). A run
holds, at its peak,

    caches S T hc_count hidden_size 2 + 2 x the largest block of the source + process

where `caches` is 3 for AutoRound (inputs from the source's prefix, from the quantized one, and the outputs) and 2
for the methods that tune each expert alone; the block counts twice, as read and as packed.
"""

from __future__ import annotations

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
_ITEM = 2  # bytes of a bfloat16 value


@dataclass(frozen=True)
class HostNeed:
    """Bytes of host memory that quantizing takes with `samples` calibration sequences."""

    samples: int
    cache: int
    total: int
    limit: int


def with_samples(
    recipe: Recipe, config: Mapping[str, Any], *, total: int | None = None, check: bool = True
) -> Recipe:
    """The recipe with its number of calibration sequences settled.

    Args:
        config: config.json of the source.
        total: host memory in bytes; default: of this machine, or of the cgroup where that is smaller. It is not
            what happens to be free now, so that a resumed run settles on the same number.
        check: refuse a number that the host does not hold.

    Raises:
        ResourceError: the memory does not hold the number asked for, or not one sequence; names the
            shortfall and the number that fits.
    """
    total = host_memory() if total is None else total
    shape = ModelShape.from_config(config)
    fit = _fitting(recipe, shape, total)
    samples = recipe.calibration.samples
    if samples == AUTO_SAMPLES:
        samples = min(fit, MOST)
    need = host_need(recipe, shape, max(samples, 1), total)
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


def host_need(recipe: Recipe, shape: ModelShape, samples: int, total: int) -> HostNeed:
    """What `samples` sequences take on a host of `total` bytes."""
    cache = samples * recipe.calibration.seqlen * shape.hc_count * shape.hidden_size * _ITEM
    method = recipe.quantize.experts.method
    caches = _CACHES.get(method, _CACHES_LOCAL)
    return HostNeed(samples, cache, caches * cache + _fixed(shape), int(SHARE * total))


def host_memory() -> int:
    """Bytes of the machine, or of the tightest cgroup."""
    limit, _ = cgroup_memory()
    installed: int = psutil.virtual_memory().total
    return installed if limit is None else min(installed, limit)


def _fitting(recipe: Recipe, shape: ModelShape, total: int) -> int:
    """Sequences that fit."""
    one = host_need(recipe, shape, 1, total)
    fixed = _fixed(shape)
    per_sample = one.total - fixed
    if per_sample == 0:  # the method uses no calibration text
        return max(recipe.calibration.samples, MOST)
    return max((one.limit - fixed) // per_sample, 0)


def _fixed(shape: ModelShape) -> int:
    """Bytes that do not depend on the number of sequences."""
    blocks: dict[str, int] = {}
    for tensor in text_tensors(shape):
        if tensor.name.startswith(LAYERS):
            layer, size = tensor.name[len(LAYERS) + 1 :].partition(".")[0], _ITEM
            for n in tensor.shape:
                size *= n
            blocks[layer] = blocks.get(layer, 0) + size
    return 2 * max(blocks.values()) + PROCESS
