"""INT8 GEMV against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from q38.base.errors import InputError
from q38.kernels import reference

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
from q38.kernels.gemv_int8 import GemvInt8, Int8Config


def matrix(k: int, n: int, group: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(-(2**31), 2**31 - 1, (k // 4, n), dtype=torch.int32)
    return words.to(device), (torch.randn(k // group, n) * 0.01).half().to(device)


@pytest.mark.parametrize(
    ("k", "n", "group", "tokens", "split"),
    [(256, 48, 128, 3, 2), (320, 64, 64, 16, 4), (96, 40, 32, 1, 1), (256, 32, 128, 5, 8)],
)
def test_any_shape_is_within_rounding_of_the_reference_and_repeats_its_bits(
    device: str, k: int, n: int, group: int, tokens: int, split: int
) -> None:
    words, scales = matrix(k, n, group, device)
    gemv = GemvInt8(words, scales, config=Int8Config(16, 16, split))
    x = torch.randn(tokens, k).half().to(device)
    out = gemv(x)
    assert reference.relative_error(out, reference.gemv_int8(x, words, scales)) < 2e-3
    assert torch.equal(gemv(x), out)  # the tickets are back at zero


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    words, scales = matrix(256, 32, 128, "cpu")
    with pytest.raises(InputError, match="scales"):
        GemvInt8(words, scales[:, :16])
    with pytest.raises(InputError, match="256 inputs"):
        GemvInt8(words, scales)(torch.zeros(1, 128).half())
    with pytest.raises(InputError, match="at most 16"):
        GemvInt8(words, scales)(torch.zeros(17, 256).half())
