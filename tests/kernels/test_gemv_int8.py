"""INT8 GEMV against the float64 reference."""

from __future__ import annotations

import pytest
import torch

from q38.base.errors import InputError, ResourceError
from q38.kernels import reference

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
from q38.kernels.gemv_int8 import GemvInt8, default_config, unsupported
from q38.kernels.gemv_int8_triton import TritonInt8Config


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
    gemv = GemvInt8(words, scales, config=TritonInt8Config(16, 16, split))
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


def test_a_geometry_gives_every_group_to_a_warp() -> None:
    for k, n, group in (
        (10240, 320, 128),
        (320, 10240, 64),
        (2560, 512, 128),
        (128, 32, 128),
        (65536, 32, 32),
    ):
        c = default_config(k, n, group)
        assert c.warps <= 32 and c.split >= 1 and c.warps * c.split <= -(-k // group // 8) * 8
        assert unsupported(n, group) is None


def test_sizes_that_the_cuda_kernel_does_not_take_fall_back_to_triton() -> None:
    assert unsupported(48, 128) is not None and unsupported(64, 16) is not None
    words, scales = matrix(256, 48, 128, "cpu")
    assert GemvInt8(words, scales).backend == "triton"
    with pytest.raises(ResourceError, match="48 columns"):
        GemvInt8(words, scales, backend="cuda")
