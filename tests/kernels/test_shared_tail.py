"""The shared expert joins the routed ones: reference, source, refusals."""

from __future__ import annotations

import pytest
import torch

from q38.base.errors import InputError
from q38.kernels import nvrtc
from q38.kernels.reference import relative_error
from q38.kernels.shared_tail import SOURCE, add_shared, defines, tail_reference, unsupported


def operands(m: int, hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """x, weight, shared, routed."""
    random = torch.Generator().manual_seed(m)
    x, shared, routed = (torch.randn(m, hidden, generator=random).to(dtype) for _ in range(3))
    return [x, (torch.randn(hidden, generator=random) / hidden**0.5).to(dtype), shared, routed]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_reference_is_the_gated_sum_rounded_once(dtype: torch.dtype) -> None:
    x, weight, shared, routed = operands(5, 96, dtype)
    gate = torch.sigmoid(torch.nn.functional.linear(x.double(), weight.double()[None]))  # [5, 1]
    exact = routed.double() + gate * shared.double()
    found = tail_reference(x, weight, shared, routed)
    assert found.dtype == dtype
    assert (
        relative_error(found, exact) < {torch.bfloat16: 3e-3, torch.float16: 4e-4, torch.float32: 1e-7}[dtype]
    )
    assert (found == exact.to(dtype)).all()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("hidden", [256, 2560, 8192])
def test_the_kernel_compiles(arch: str, dtype: torch.dtype, hidden: int) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        from cuda.bindings import nvrtc as library

        library.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed ({error})")
    assert b"shared_tail" in nvrtc.compile_cubin(SOURCE, defines(hidden, dtype), arch)


def test_what_the_kernel_does_not_take_is_refused() -> None:
    assert unsupported(2560, torch.bfloat16) is None
    for hidden, dtype, word in (
        (100, torch.bfloat16, "100"),
        (8448, torch.float16, "8448"),
        (256, torch.float32, "float32"),
    ):
        assert word in str(unsupported(hidden, dtype))
    for m in (0, 17):
        with pytest.raises(InputError, match="at most 16"):
            add_shared(*operands(m, 256, torch.bfloat16))
    x, weight, shared, routed = operands(2, 256, torch.bfloat16)
    for wrong in (
        (x, weight[:128], shared, routed),
        (x, weight.half(), shared, routed),
        (x, weight, shared[:1], routed),
        (x, weight, shared, routed.float()),
        (x, weight, shared, routed.T.contiguous().T),
    ):
        with pytest.raises(InputError, match="shared expert"):
            add_shared(*wrong)
