"""Block-scaled fp8 matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.checkpoint.fp8 import block_size, dequantize_blocks


def codes(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n * k)).to(torch.float8_e4m3fn)


@given(rows=st.integers(1, 3), columns=st.integers(1, 3), extra=st.integers(0, 100))
def test_each_weight_is_its_code_times_the_scale_of_its_block(rows: int, columns: int, extra: int) -> None:
    n, k = 128 * rows, 128 * (columns - 1) + 28 + extra  # a last block of any width
    scales = torch.rand(rows, -(-k // 128), generator=torch.Generator().manual_seed(extra)).to(torch.bfloat16)
    matrix = codes(n, k)
    weight = dequantize_blocks(matrix, scales)
    assert weight.dtype == torch.bfloat16
    for i, j in ((0, 0), (n - 1, k - 1), (n // 2, k // 2)):
        product = matrix[i, j].float() * scales[i // 128, j // 128].float()
        assert weight[i, j] == product.to(torch.bfloat16)


def test_blocks_of_another_size_follow_from_the_shapes() -> None:
    assert (block_size(256, 2), block_size(200, 2), block_size(640, 5), block_size(64, 1)) == (
        128,
        128,
        128,
        64,
    )


@pytest.mark.parametrize("shape", [(0, 1), (300, 1), (2,)])
def test_scales_that_do_not_fit_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        dequantize_blocks(codes(256, 128), torch.ones(shape))
