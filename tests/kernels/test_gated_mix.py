"""The mix of a hyper-connection through INT8 matrices, against float64."""

from __future__ import annotations

import pytest
import torch

from q38.checkpoint.packing import pack
from q38.kernels.reference import dequantize_words, relative_error

pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
from q38.kernels import gated_mix
from q38.kernels.gated_mix import GatedMix, mix_reference
from q38.kernels.gemv_int8 import COLUMNS, gate_columns

BRANCHES, HIDDEN, RANK, GROUP = 4, 64, 32, 32


def matrices() -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Random words and scales of both matrices, columns as they come."""
    random = torch.Generator().manual_seed(0)
    found = []
    for k, n in ((BRANCHES * HIDDEN, RANK), (RANK, BRANCHES * HIDDEN)):
        codes = torch.randint(0, 256, (k, n), dtype=torch.uint8, generator=random)
        found.append((pack(codes, 8), (torch.rand(k // GROUP, n, generator=random) * 2e-3).half()))
    return found[0], found[1]


@pytest.mark.parametrize("tokens", [1, 5, 40])
def test_the_mix_is_that_of_the_plain_formula(tokens: int) -> None:
    down, up = matrices()
    order = gate_columns(BRANCHES * HIDDEN, BRANCHES)
    mix = GatedMix(down, (up[0][:, order].contiguous(), up[1][:, order].contiguous()), BRANCHES)
    x = torch.randn(tokens, BRANCHES * HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = [dequantize_words(*matrix, 8, torch.float64) for matrix in (down, up)]
    exact = mix_reference(x, *plain, BRANCHES)
    assert mix(x).dtype == x.dtype
    assert relative_error(mix(x), exact) < 1e-2
    assert relative_error(x.view(tokens, BRANCHES, HIDDEN).mean(1), exact) > 0.1  # the gates matter here


def test_a_block_of_columns_holds_all_branches_of_its_channels() -> None:
    order = gate_columns(BRANCHES * HIDDEN, BRANCHES)
    assert sorted(order.tolist()) == list(range(BRANCHES * HIDDEN))
    for block in order.view(-1, COLUMNS):
        channels = block.view(BRANCHES, -1) - HIDDEN * torch.arange(BRANCHES)[:, None]
        assert (channels == channels[0]).all() and (channels[0].diff() == 1).all()


def test_the_gates_of_many_tokens_by_the_kernel(device: str) -> None:
    """What one token needs, for any number of them; 600 channels are more than a program takes."""
    hidden = 600
    random = torch.Generator().manual_seed(0)
    sums, x = (torch.randn(3, BRANCHES * hidden, generator=random) for _ in range(2))
    order = torch.argsort(gate_columns(BRANCHES * hidden, BRANCHES))
    exact = (sums[:, order].double().sigmoid() * x.double()).view(3, BRANCHES, hidden).mean(1)
    out = torch.empty(3, hidden, device=device)
    gated_mix._gate[(3, 2)](
        sums.to(device), x.to(device), out, hidden, BRANCHES=BRANCHES, CHANNELS=COLUMNS // BRANCHES, BLOCK=512
    )
    assert relative_error(out, exact) < 1e-5
    assert relative_error(gated_mix.gate(sums, x, BRANCHES), exact) < 1e-5
