"""Disk that `q38 quantize` takes beside its output while it runs: what a killed run goes on from.

rtn           nothing
autoround     4 caches of block inputs: two chains of them (as the source gives them and as quantized), the new
              ones written before the old ones go
the others    2 caches (one chain), and the packed experts of the block in hand
"""

from __future__ import annotations

from q38.model.names import Group
from q38.model.shape import ModelShape
from q38.recipe.samples import cache_bytes
from q38.recipe.schema import Recipe


def scratch_bytes(recipe: Recipe, shape: ModelShape, samples: int, item: int) -> int:
    """Bytes at most, with `samples` calibration sequences and `item` bytes a value of the block inputs."""
    method = recipe.quantize.experts.method
    if method == "rtn":
        return 0
    cache = cache_bytes(recipe, shape, samples, item)
    if method == "autoround":
        return 4 * cache
    return 2 * cache + _packed_experts(recipe, shape)


def _packed_experts(recipe: Recipe, shape: ModelShape) -> int:
    """Words, zeros and scales of all experts of a block."""
    bits, group_size = recipe.quantize.bits.get(Group.EXPERTS, 16), recipe.quantize.group_size
    weights = shape.num_experts * 3 * shape.moe_intermediate_size * shape.hidden_size
    return weights * bits // 8 + weights // group_size * (16 + bits) // 8
