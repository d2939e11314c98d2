"""INT8 matrices for any number of vectors, against the reference. The Triton kernel runs in its interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from q38.base.settings import child_env
from q38.kernels.int8_matmul import Int8Matrix
from q38.kernels.reference import gemv_int8


def matrix(k: int, n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (k // 4, n), dtype=torch.int64, generator=random).to(torch.int32)
    scales = (torch.rand(k // 128, n, generator=random) * 0.01 - 0.003).half()
    return words, scales


@given(rows=st.integers(1, 40), groups=st.integers(1, 3), columns=st.sampled_from([32, 96]))
def test_it_multiplies_as_the_reference_does(rows: int, groups: int, columns: int) -> None:
    words, scales = matrix(128 * groups, columns)
    x = torch.randn(rows, 128 * groups)
    found = Int8Matrix(words, scales)(x)
    torch.testing.assert_close(found, gemv_int8(x, words, scales, torch.float32))


@pytest.mark.parametrize("shape", [(256,), (2, 3, 256)])
def test_any_leading_shape_is_kept(shape: tuple[int, ...]) -> None:
    words, scales = matrix(256, 64)
    assert Int8Matrix(words, scales)(torch.randn(shape)).shape == (*shape[:-1], 64)


_UNPACK = """
import torch
from q38.kernels.int8_matmul import unpack
from q38.kernels.reference import dequantize_words
from tests.kernels.test_int8_matmul import matrix

for k, n, first, columns in ((256, 96, 0, 96), (384, 300, 37, 200)):
    words, scales = matrix(k, n)
    found = unpack(words, scales, first, columns, torch.float16)
    wanted = dequantize_words(words, scales, 8, torch.float32)[:, first : first + columns].half()
    assert torch.equal(found, wanted), (k, n)
"""


def test_the_kernel_unpacks_a_block_of_columns() -> None:
    """In a process of its own: Triton reads TRITON_INTERPRET when it is imported."""
    child = subprocess.run(
        [sys.executable, "-c", _UNPACK],
        env=child_env({"TRITON_INTERPRET": "1"}),
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
