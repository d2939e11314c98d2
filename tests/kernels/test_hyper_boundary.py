"""The boundary between two blocks: its reference against the plain formulas, its source through NVRTC, what it refuses."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError
from q38.kernels import nvrtc
from q38.kernels.hyper_boundary import (
    SOURCE,
    Norm,
    boundary_reference,
    cross,
    defines,
    gate_parts,
    parts_reference,
    unsupported,
)
from q38.kernels.reference import relative_error

EPS = 1e-6


def rows(m: int, n: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain_combine(
    output: torch.Tensor, streams: torch.Tensor, normed: torch.Tensor, inject: torch.Tensor
) -> torch.Tensor:
    """GatedResidual._combine_compute of SGLang in float64."""
    branches = len(inject)
    gates = 2 * torch.sigmoid(
        torch.nn.functional.linear(normed.double(), inject.double()) / branches
    )  # [M, c]
    r = streams.double().unflatten(-1, (branches, -1))
    return (r + output.double().unsqueeze(-2) * gates.unsqueeze(-1)).flatten(-2)


def plain_norm(x: torch.Tensor, weight: torch.Tensor, branches: int) -> torch.Tensor:
    """GroupedGemmaRMSNorm.forward of SGLang in float64."""
    grouped = x.double().unflatten(-1, (branches, -1))
    grouped = grouped * torch.rsqrt(grouped.pow(2).mean(-1, keepdim=True) + EPS)
    return grouped.flatten(-2) * (1 + weight.double())


@settings(max_examples=25, deadline=None)
@given(
    m=st.integers(1, 5),
    branches=st.integers(1, 5),
    hidden=st.sampled_from([8, 24, 64]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 1000),
)
def test_two_boundaries_in_a_row_are_the_plain_formulas(
    m: int, branches: int, hidden: int, dtype: torch.dtype, seed: int
) -> None:
    """The second takes its gates from the sums that the first left."""
    width = branches * hidden
    streams, normed = rows(m, width, seed, dtype), rows(m, width, seed + 1, dtype)
    first, second = rows(m, hidden, seed + 2, dtype), rows(m, hidden, seed + 3, dtype)
    inject = [rows(branches, width, seed + i, dtype) / 4 for i in (4, 5)]
    norm = Norm(rows(1, width, seed + 6, dtype)[0] / 2, EPS)
    a = boundary_reference(
        first, streams, parts_reference(normed, inject[0]).float(), norm=norm, inject=inject[1]
    )
    assert a.normed is not None and a.parts is not None
    b = boundary_reference(second, a.combined, a.parts)
    near = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-6}[dtype]
    assert relative_error(a.combined, plain_combine(first, streams, normed, inject[0])) < near
    assert relative_error(a.normed, plain_norm(a.combined, norm.weight, branches)) < near
    assert relative_error(b.combined, plain_combine(second, a.combined, a.normed, inject[1])) < near
    assert (b.normed, b.parts) == (None, None)


def test_the_norm_is_of_the_rounded_streams() -> None:
    """To the bit; of the sums before rounding it would not be."""
    streams, output, weight = rows(5, 256, 0), rows(5, 64, 1), rows(1, 256, 2)[0]
    parts = torch.zeros(5, 4, 4)  # gates of 1
    found = boundary_reference(output, streams, parts, norm=Norm(weight, EPS))
    assert found.normed is not None
    assert torch.equal(found.normed, plain_norm(found.combined, weight, 4).bfloat16())
    exact = streams.double() + output.double().repeat(1, 4)
    assert not torch.equal(found.normed, plain_norm(exact, weight, 4).bfloat16())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("hidden", "branches"), [(2560, 4), (512, 8)])
def test_every_kind_compiles(arch: str, dtype: torch.dtype, hidden: int, branches: int) -> None:
    for norm, gates in ((True, True), (True, False), (False, False)):
        cubin = nvrtc.compile_cubin(SOURCE, defines(hidden, branches, dtype, norm=norm, gates=gates), arch)
        assert b"boundary" in cubin and b"gate_parts" in cubin


def test_sizes_that_the_kernels_do_not_take_are_named() -> None:
    assert unsupported(2560, 4, torch.bfloat16) is None
    for hidden, branches, dtype, word in (
        (2560, 4, torch.float32, "float32"),
        (2304, 4, torch.bfloat16, "2304 channels"),
        (0, 4, torch.bfloat16, "0 channels"),
        (32768, 4, torch.bfloat16, "32768"),
        (512, 9, torch.bfloat16, "9 streams"),
    ):
        assert word in str(unsupported(hidden, branches, dtype))


@pytest.mark.parametrize("m", [0, 17])
def test_other_numbers_of_tokens_are_refused(m: int) -> None:
    with pytest.raises(InputError, match="at most 16"):
        gate_parts(torch.zeros(m, 2048).bfloat16(), torch.zeros(4, 2048).bfloat16())


def test_tensors_that_do_not_belong_together_are_refused() -> None:
    output, streams = torch.zeros(2, 512).bfloat16(), torch.zeros(2, 2048).bfloat16()
    inject, parts = torch.zeros(4, 2048).bfloat16(), torch.zeros(2, 4, 4)
    norm = Norm(torch.zeros(2048).bfloat16(), EPS)
    with pytest.raises(InputError, match="without a norm"):
        cross(output, streams, parts, inject=inject)
    with pytest.raises(InputError, match="an output"):
        cross(output[:1], streams, parts)
    with pytest.raises(InputError, match="an output"):
        cross(output, streams, parts[:1], norm=norm)
    for wrong in (inject.half(), inject[:, :512], inject[:, ::2]):
        with pytest.raises(InputError, match="weights"):
            cross(output, streams, parts, norm=norm, inject=wrong)
    with pytest.raises(InputError, match="dtype"):
        cross(output, streams.T.contiguous().T, parts)
