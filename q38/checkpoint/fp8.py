"""Block-scaled fp8 matrices, as the FP8 release stores experts.

w[n, k] = code[n, k] * weight_scale_inv[n // block_n, k // block_k]; the blocks (128 x 128 in the
release) follow from the two shapes. Despite its name the scale multiplies.
"""

from __future__ import annotations

import torch


def dequantize_blocks(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weights of one matrix.

    Args:
        codes: float8 [N, K].
        scales: any float dtype [ceil(N / block_n), ceil(K / block_k)].

    Returns:
        bfloat16 [N, K]: the float32 product, rounded once.

    Raises:
        ValueError: the scales are not two-dimensional or more than there are rows or columns.
    """
    (n, k), blocks = codes.shape, scales.shape
    if len(blocks) != 2 or not 0 < blocks[0] <= n or not 0 < blocks[1] <= k:
        raise ValueError(f"scales {list(blocks)} do not fit a matrix [{n}, {k}]")
    rows = torch.arange(n, device=codes.device) // block_size(n, blocks[0])
    columns = torch.arange(k, device=codes.device) // block_size(k, blocks[1])
    by_weight = scales.to(torch.float32)[rows][:, columns]  # [N, K]
    return codes.to(torch.float32).mul_(by_weight).to(torch.bfloat16)


def block_size(size: int, blocks: int) -> int:
    """Weights per block: the smallest power of two that cuts `size` into at most `blocks` blocks."""
    block = 1
    while -(-size // block) > blocks:
        block *= 2
    return block
