"""How many tokens each expert of a block gets, where AutoRound runs the block."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from q38.quantize.adjustments import replaced


@contextmanager
def counted(counts: dict[int, list[int]], *, experts: int, tokens: int) -> Iterator[None]:
    """Fill `counts` for every block that AutoRound tunes inside.

    Args:
        counts: index of a block -> tokens routed to each of its experts.
        experts: of a block.
        tokens: of calibration. AutoRound's first pass over them is of the block as it is in the source; later ones
            are not counted.
    """
    from auto_round.algorithms.composer import AlgorithmComposer

    original = AlgorithmComposer.compress_block

    @functools.wraps(original)
    def compress_block(self: Any, block: Any, *args: Any, block_ctx: Any, **kwargs: Any) -> Any:
        found, left = torch.zeros(experts, dtype=torch.int64), tokens

        def look(module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            """inputs: hidden [n, H], chosen int64 [n, k], weights [n, k]."""
            nonlocal left
            if left > 0:
                found.add_(torch.bincount(inputs[1].flatten().cpu(), minlength=experts))
                left -= len(inputs[1])

        hook = block.mlp.experts.register_forward_pre_hook(look)
        try:
            return original(self, block, *args, block_ctx=block_ctx, **kwargs)
        finally:
            hook.remove()
            counts[block_ctx.block_index] = found.tolist()

    with replaced(AlgorithmComposer, "compress_block", compress_block):
        yield
