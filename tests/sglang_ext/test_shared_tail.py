"""Which calls of SGLang's gated sum go to the kernel, and that the others go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from q38.kernels.shared_tail import tail_reference
from q38.sglang_ext import shared_tail
from tests.sglang_ext.conftest import Child
from tests.sglang_ext.test_hyper_boundary import on_device


def operands(m: int = 2, hidden: int = 256) -> list[Any]:
    return [on_device(m, hidden), on_device(hidden), on_device(m, hidden), on_device(m, hidden)]


def test_a_call_that_fits_goes_to_the_kernel_and_the_rest_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    went: list[str] = []
    monkeypatch.setattr(shared_tail.nvrtc, "available", lambda: None)
    monkeypatch.setattr(shared_tail, "add_shared", lambda *_: went.append("kernel"))

    def original(*_: Any, do_add: bool) -> None:
        went.append(f"sglang {do_add}")

    shared_tail.add_gated(original, *operands(), do_add=True)
    shared_tail.add_gated(original, *operands(16), do_add=True)
    assert went == ["kernel", "kernel"]
    x, weight, shared, routed = operands()
    for wrong in (
        operands(17),
        operands(0),
        operands(2, 128),
        (torch.zeros(2, 256).bfloat16(), weight, shared, routed),
        (x, weight, shared, on_device(2, 256, dtype=torch.float32)),
        (x, weight, on_device(256, 2).T, routed),
        (x, on_device(128), shared, routed),
    ):
        shared_tail.add_gated(original, *wrong, do_add=True)
    assert went[2:] == ["sglang True"] * 7
    shared_tail.add_gated(original, x, weight, shared, routed, do_add=False)  # out of place, for a later sum
    monkeypatch.setattr(shared_tail.nvrtc, "available", lambda: "no NVRTC")
    shared_tail.add_gated(original, x, weight, shared, routed, do_add=True)
    assert went[9:] == ["sglang False", "sglang True"]


def test_the_block_of_sglang_calls_the_hooked_function(sglang_child: Child) -> None:
    """Through SGLang's own wrapper, beneath the one that the CPU engine puts around it; Triton's interpreter computes."""
    seen, found = sglang_child.run(
        """
import torch
from q38.sglang_ext import shared_tail
from sglang.kernels.ops.elementwise import elementwise
from sglang.srt.models import qwen2_moe
seen, fits = [], shared_tail.fits
shared_tail.fits = lambda *a: seen.append([len(a[0]), a[1].ndim]) or False
plain = elementwise.fused_gate_sigmoid_mul_add
while hasattr(plain, "__wrapped__"):
    plain = plain.__wrapped__
random = torch.Generator().manual_seed(0)
x, shared, routed = (torch.randn(3, 256, generator=random).half() for _ in range(3))
weight = (torch.randn(256, generator=random) / 16).half()
out = routed.clone()
plain(x, weight, shared, out)
shared_tail.fits = fits
result = [seen, [t.tolist() for t in (x, weight, shared, routed, out)]]
"""
    )
    assert seen == [[3, 1]]
    x, weight, shared, routed, out = (torch.tensor(t).half() for t in found)
    assert torch.allclose(out.float(), tail_reference(x, weight, shared, routed).float(), atol=2e-3)
