"""The mix of a hyper-connection on a real GPU, at the size of the release."""

from __future__ import annotations

import pytest
import torch

from q38.kernels.reference import dequantize_words, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
if torch.cuda.is_available():
    from q38.kernels.gated_mix import GatedMix, mix_reference
    from q38.kernels.gemv_int8 import gate_columns

BRANCHES, HIDDEN, RANK = 4, 2560, 320


def matrix(k: int, n: int, group: int) -> tuple[torch.Tensor, torch.Tensor]:
    words = torch.randint(-(2**31), 2**31, (k // 4, n), dtype=torch.int64, device="cuda").to(torch.int32)
    return words, (torch.rand(k // group, n, device="cuda") * 5e-4).half()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_mix_is_that_of_the_plain_formula_in_a_graph_too(dtype: torch.dtype) -> None:
    """Few tokens take the epilogues, many the plain products; a token's bits depend on no other token."""
    down, up = matrix(BRANCHES * HIDDEN, RANK, 128), matrix(RANK, BRANCHES * HIDDEN, 64)
    order = gate_columns(BRANCHES * HIDDEN, BRANCHES).cuda()
    mix = GatedMix(down, (up[0][:, order].contiguous(), up[1][:, order].contiguous()), BRANCHES)
    assert mix._few is not None
    mix.warm_up(dtype)
    plain = [dequantize_words(*m, 8, torch.float64) for m in (down, up)]
    x = torch.randn(300, BRANCHES * HIDDEN, device="cuda").to(dtype)
    first = mix(x[:1]).clone()
    for tokens in (1, 3, 8, 9, 16, 17, 300):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = mix(x[:tokens])
        for _ in range(3):
            out.zero_()
            graph.replay()
            assert relative_error(out, mix_reference(x[:tokens], *plain, BRANCHES)) < 1e-2
        assert tokens > 16 or torch.equal(out[:1], first)
