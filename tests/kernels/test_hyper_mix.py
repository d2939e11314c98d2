"""The mix with matrices as they are: its references against SGLang's plain formula, its source through NVRTC, what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.kernels import nvrtc
from q38.kernels.hyper_mix import (
    SOURCE,
    defines,
    mix,
    mix_reference,
    mix_rounded,
    parts,
    refusal,
    unsupported,
)
from q38.kernels.reference import relative_error


def operands(
    m: int, branches: int, hidden: int, rank: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, down, up; gates that matter."""
    random = torch.Generator().manual_seed(seed)
    width = branches * hidden
    x, down, up = (torch.randn(s, generator=random) for s in ((m, width), (rank, width), (width, rank)))
    return x.to(dtype), (down * 4 / width**0.5).to(dtype), (up * 2 / rank**0.5).to(dtype)


def plain_mix(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int) -> torch.Tensor:
    """GatedResidual._mix_compute of SGLang, in the dtype of its operands."""
    weight = torch.nn.functional.silu(torch.nn.functional.linear(x, down) / branches)
    weight = torch.sigmoid(torch.nn.functional.linear(weight, up)).unflatten(-1, (branches, -1))
    return (weight * x.unflatten(-1, (branches, -1))).mean(dim=-2)


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 5),
    branches=st.integers(1, 5),
    hidden=st.sampled_from([8, 24, 64]),
    rank=st.sampled_from([4, 32]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_the_references_are_the_plain_formula(
    m: int, branches: int, hidden: int, rank: int, dtype: torch.dtype, seed: int
) -> None:
    x, down, up = operands(m, branches, hidden, rank, dtype, seed)
    exact = plain_mix(x.double(), down.double(), up.double(), branches)
    assert relative_error(mix_reference(x, down, up, branches), exact) < 1e-12
    rounded = mix_rounded(x, down, up, branches)
    assert rounded.dtype == dtype and rounded.shape == (m, hidden)
    near = {torch.bfloat16: 6e-3, torch.float16: 8e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(rounded, exact) < near


def test_silu_is_rounded_and_nothing_between_it_and_the_result() -> None:
    x, down, up = operands(5, 4, 64, 32, torch.bfloat16)
    low = torch.nn.functional.silu(x.double() @ down.double().T / 4)
    found, unrounded = mix_rounded(x, down, up, 4), mix_reference(x, down, up, 4).bfloat16()
    assert not torch.equal(found, unrounded)
    gates = torch.sigmoid(low.bfloat16().double() @ up.double().T)
    exact = (gates * x.double()).view(5, 4, 64).mean(1)
    assert torch.equal(found, exact.bfloat16())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "branches", "rank"), [(2560, 4, 320), (4096, 8, 512), (48, 2, 32)])
def test_both_launches_compile(arch: str, dtype: torch.dtype, hidden: int, branches: int, rank: int) -> None:
    for tokens in (1, 16):
        cubin = nvrtc.compile_cubin(SOURCE, defines(hidden, branches, rank, tokens, dtype), arch)
        assert b".text.mix_down" in cubin and b".text.mix_up" in cubin


@given(steps=st.integers(1, 1024))
def test_a_warp_of_the_first_launch_has_no_more_inputs_than_its_registers_take(steps: int) -> None:
    """And no part is without inputs; as the source divides them."""
    split = parts(32 * steps)
    a_warp = -(-steps // (split * 8))
    assert 1 <= a_warp <= 8 and split * 8 * a_warp >= steps
    assert (split - 1) * 8 * a_warp < steps


def test_sizes_that_the_kernels_do_not_take_are_named() -> None:
    assert unsupported(2560, 4, 320, torch.bfloat16) is None
    assert parts(4 * 2560) == 5
    for hidden, branches, rank, dtype, word in (
        (2560, 4, 320, torch.float32, "float32"),
        (2568, 4, 320, torch.bfloat16, "2568 channels"),
        (16, 1, 320, torch.bfloat16, "16 channels"),
        (0, 4, 320, torch.bfloat16, "0 channels"),
        (16384, 4, 320, torch.bfloat16, "16384"),
        (2560, 9, 320, torch.bfloat16, "9 streams"),
        (2560, 4, 328, torch.bfloat16, "rank of 328"),
        (2560, 4, 1024, torch.bfloat16, "rank of 1024"),
        (2560, 4, 0, torch.bfloat16, "rank of 0"),
    ):
        assert word in str(unsupported(hidden, branches, rank, dtype))


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    x, down, up = operands(2, 4, 64, 32, torch.bfloat16)
    assert refusal(x, down, up, 4) is None
    for m in (0, 17):
        with pytest.raises(InputError, match="1 to 16"):
            mix(*operands(m, 4, 64, 32, torch.bfloat16), 4)
    odd = torch.zeros(x.numel() + 1).bfloat16()[1:].view(x.shape)
    for wrong, word in (
        ((x[0], down, up, 4), "4 streams"),
        ((x, down, up, 3), "3 streams"),
        ((x, down, up, 0), "0 streams"),
        ((x, up, down, 4), "matrices"),
        ((x, down[:16], up, 4), "matrices"),
        ((x, down.half(), up, 4), "bfloat16"),
        ((x, down, up.T.contiguous().T, 4), "contiguous"),
        ((x.T.contiguous().T, down, up, 4), "contiguous"),
        ((odd, down, up, 4), "aligned"),
        ((x.float(), down.float(), up.float(), 4), "float32"),
    ):
        with pytest.raises(InputError, match=word):
            mix(*wrong)
