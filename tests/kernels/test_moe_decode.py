"""Decode MoE: the Triton backend against the float64 reference, and what both backends refuse."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from q38.base.errors import InputError, ResourceError
from q38.kernels import reference
from q38.kernels.moe_decode import DecodeConfig, MoeDecode, default_config, unsupported
from q38.residency.layout import ExpertLayout, address_table
from tests.kernels.data import make_routing, make_rows

SMALL = ExpertLayout(64, 32, 32)
REAL = ExpertLayout(2560, 640)


def run(
    layout: ExpertLayout,
    rows: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    device: str,
) -> torch.Tensor:
    moe = MoeDecode(layout, ids.shape[1], dtype=x.dtype, backend="triton", device=device)
    table = address_table(list(rows)).to(device)
    return moe(x.to(device), table, ids.to(device), weights.to(device)).cpu()


@given(
    st.sampled_from([(16, 1, 2), (32, 2, 1), (64, 1, 1), (128, 1, 1)]),
    st.sampled_from([1, 2, 5, 16]),
    st.integers(1, 2),
    st.sampled_from([torch.float16, torch.float32]),
    st.integers(0, 2**31),
)
@settings(max_examples=4, deadline=None)
def test_any_shape_is_within_rounding_of_the_reference(
    device: str, shape: tuple[int, int, int], tokens: int, top_k: int, scale_as: torch.dtype, seed: int
) -> None:
    group, k, n = shape
    layout = ExpertLayout(group * k, group * n, group)
    scale_dtype = torch.bfloat16 if device == "cuda" and scale_as == torch.float32 else torch.float16
    rows = make_rows(layout, 4, scale_dtype=scale_dtype, seed=seed, device=device)
    ids, weights = make_routing(tokens, 4, top_k, seed=seed, absent=0.2)
    x = (torch.randn(tokens, layout.hidden) * 3).half()
    moe = MoeDecode(layout, top_k, dtype=x.dtype, scale_dtype=scale_dtype, backend="triton", device=device)
    out = moe(x.to(device), address_table(list(rows)).to(device), ids.to(device), weights.to(device)).cpu()
    exact = reference.moe(x, list(rows.cpu()), ids, weights, layout, scale_dtype)
    assert reference.relative_error(out, exact) < 2e-3 or not exact.any()


def test_a_token_has_the_same_bits_alone_and_among_others(device: str) -> None:
    rows = make_rows(SMALL, 4, device=device)
    ids, weights = make_routing(3, 4, 2)
    x = torch.randn(3, 64).half()
    together = run(SMALL, rows, x, ids, weights, device)
    for m in range(3):
        assert torch.equal(
            run(SMALL, rows, x[m : m + 1], ids[m : m + 1], weights[m : m + 1], device)[0], together[m]
        )


def test_rows_may_lie_in_different_allocations(device: str) -> None:
    rows = [row.clone() for row in make_rows(SMALL, 4, device=device)]
    ids, weights = make_routing(2, 4, 2)
    x = torch.randn(2, 64).half()
    apart = MoeDecode(SMALL, 2, dtype=x.dtype, backend="triton", device=device)(
        x.to(device), address_table(rows).to(device), ids.to(device), weights.to(device)
    )
    assert torch.equal(apart.cpu(), run(SMALL, torch.stack(rows), x, ids, weights, device))


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"x": torch.zeros(17, 64).half()}, "tokens|ids"),
        ({"x": torch.zeros(2, 32).half()}, "x is"),
        ({"ids": torch.zeros(2, 2, dtype=torch.int64)}, "ids is"),
        ({"weights": torch.zeros(2, 2).half()}, "weights is"),
        ({"table": torch.zeros(4, dtype=torch.int32)}, "table is"),
    ],
)
def test_arguments_of_another_shape_or_dtype_are_refused(
    device: str, change: dict[str, torch.Tensor], word: str
) -> None:
    arguments = {
        "x": torch.zeros(2, 64).half(),
        "table": torch.zeros(4, dtype=torch.int64),
        "ids": torch.zeros(2, 2, dtype=torch.int32),
        "weights": torch.zeros(2, 2),
    } | change
    moe = MoeDecode(SMALL, 2, dtype=torch.float16, backend="triton", device=device)
    with pytest.raises(InputError, match=word):
        moe(**arguments)


def test_more_than_16_tokens_are_refused(device: str) -> None:
    moe = MoeDecode(SMALL, 1, dtype=torch.float16, backend="triton", device=device)
    with pytest.raises(InputError, match="17 tokens"):
        moe(
            torch.zeros(17, 64).half(),
            torch.zeros(4, dtype=torch.int64),
            torch.zeros(17, 1, dtype=torch.int32),
            torch.zeros(17, 1),
        )


def test_experts_of_other_bits_are_refused() -> None:
    with pytest.raises(InputError, match="4 bits"):
        MoeDecode(ExpertLayout(64, 32, 32, bits=4), 2, backend="triton", device="cpu")


def test_the_cuda_backend_is_refused_with_the_reason_where_it_cannot_run() -> None:
    with pytest.raises(ResourceError, match="groups of 32"):
        MoeDecode(SMALL, 2, backend="cuda", device="cpu")
    with pytest.raises(ResourceError, match="no CUDA device"):
        MoeDecode(REAL, 10, backend="cuda", device="cpu")


def test_the_default_geometry_suits_any_shape_that_the_cuda_kernels_take() -> None:
    for hidden, inter in ((2560, 640), (2048, 768), (256, 128), (4096, 1024), (384, 384)):
        layout = ExpertLayout(hidden, inter)
        for tokens in range(1, 17):
            for host_rows in (False, True):
                config = default_config(layout, tokens, host_rows=host_rows)
                assert unsupported(layout, 8, config) is None and config.registers == host_rows


@pytest.mark.parametrize(
    "config",
    [
        DecodeConfig(tiles13=3),
        DecodeConfig(batch=5),
        DecodeConfig(tiles13=2, registers=True),
        DecodeConfig(depth13=0),
    ],
)
def test_a_geometry_that_the_cuda_kernels_cannot_run_is_named(config: DecodeConfig) -> None:
    assert unsupported(REAL, 10, config) is not None
