"""Which calls of SGLang's mix go to q38's kernels, inside SGLang's own module, with the reference in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from q38.sglang_ext import hyper_mix
from tests.sglang_ext.conftest import Child
from tests.sglang_ext.test_hyper_boundary import CHAIN, on_device

BRANCHES, HIDDEN, RANK = 4, 64, 32


def operands(m: int = 2, rank: int = RANK, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    width = BRANCHES * HIDDEN
    shapes = ((m, width), (rank, width), (width, rank))
    return [*(on_device(*shape, dtype=dtype) for shape in shapes), BRANCHES, HIDDEN]


def test_a_call_that_fits_goes_to_the_kernels_and_the_rest_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_mix.nvrtc, "available", lambda: None)
    monkeypatch.setattr(hyper_mix, "mix", lambda *_: "q38")

    def went(*call: Any) -> Any:
        return hyper_mix.mix_few(lambda *_: "sglang", *call)  # type: ignore[arg-type,return-value]

    for call in (operands(), operands(1), operands(16), operands(dtype=torch.float16)):
        assert went(*call) == "q38"
    x, down, up, branches, hidden = operands()
    for call in (
        operands(0),
        operands(17),
        operands(rank=40),
        operands(dtype=torch.float32),
        [torch.zeros(x.shape).bfloat16(), down, up, branches, hidden],
        [x, down.half(), up, branches, hidden],
        [x, down, up.T.contiguous().T, branches, hidden],
        [x, down, up, branches, hidden // 2],
        [x[None], down, up, branches, hidden],
    ):
        assert went(*call) == "sglang"
    monkeypatch.setattr(hyper_mix.nvrtc, "available", lambda: "no NVRTC")
    assert went(*operands()) == "sglang"


MIX = (
    CHAIN
    + """
from q38.kernels import hyper_mix as kernels_of_the_mix
from q38.sglang_ext import hyper_mix
from sglang.kernels.ops.gemm import hc_mix
from sglang.srt.layers import hyperconnection

tokens = []
def stand_in(x, down, up, branches):
    tokens.append(len(x))
    return kernels_of_the_mix.mix_rounded(x, down, up, branches)
def as_on_a_gpu(run, int8=False):
    "SGLang's own check is kept but for the device; its kernel would fail here."
    kept = hyperconnection.fused_hc_mix_supported, hyper_mix.fits, hyper_mix.mix
    hyperconnection.fused_hc_mix_supported = lambda x, down, up: x.dtype == down.dtype == up.dtype and len(x) <= 16
    hyper_mix.fits, hyper_mix.mix = lambda *a: True, stand_in
    try:
        return run(int8)
    finally:
        hyperconnection.fused_hc_mix_supported, hyper_mix.fits, hyper_mix.mix = kept
"""
)


def test_sglangs_blocks_call_the_hooked_function_and_give_the_same_streams(sglang_child: Child) -> None:
    """The boundary's sums, which travel on the normalized streams, pass the mix."""
    same, apart, tokens, summed = sglang_child.run(
        MIX
        + """
plain = fused()
summed.clear()
ours = as_on_a_gpu(fused)
result = [hyperconnection.fused_hc_mix is hc_mix.fused_hc_mix, [distance(x, y) for x, y in zip(ours, plain)], tokens, summed]
"""
    )
    assert same is True
    assert 0 < max(apart) < 8e-3
    assert tokens == [5, 5, 5, 5]
    assert summed == [5, 5]  # the two that SGLang has normalized, as without the hook


def test_longer_steps_and_int8_mixes_do_not_come_to_the_kernels(sglang_child: Child) -> None:
    tokens, shapes = sglang_child.run(
        MIX
        + """
long = torch.randn(17, 256).bfloat16()
mixed = as_on_a_gpu(lambda _: build(1).mix(long)[0])
as_on_a_gpu(run, int8=True)
result = [tokens, list(mixed.shape)]
"""
    )
    assert tokens == [] and shapes == [17, 64]
