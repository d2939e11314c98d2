"""The boundary between two blocks inside SGLang's own module, with the references in place of the kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from q38.sglang_ext import hyper_boundary
from tests.sglang_ext.conftest import Child

BRANCHES, HIDDEN = 4, 512
CHAIN = """
import torch
from q38.kernels import hyper_boundary as kernels
from q38.sglang_ext import hyper_boundary, hyper_connections
from q38.sglang_ext.options import ExtensionOptions
from sglang.srt.layers.hyperconnection import GatedResidual, HyperConnectionConfig

def build(seed, int8=False, use_combine=True):
    hyper_connections.given = lambda: ExtensionOptions("m", int8_mixes=int8)
    made = GatedResidual(HyperConnectionConfig(4, 64, torch.bfloat16, False, 32, 1e-6, True), use_combine=use_combine)
    made.bfloat16()
    random = torch.Generator().manual_seed(seed)
    for name, shape in (("input_mix_weight_down", (32, 256)), ("input_mix_weight_up", (256, 32)), ("block_inject_weight", (4, 256))):
        if hasattr(made, name):
            parameter, matrix = getattr(made, name).weight, (torch.randn(shape, generator=random) * 0.3).bfloat16()
            loader = getattr(parameter, "weight_loader", None)
            loader(parameter, matrix) if loader else parameter.data.copy_(matrix)
    made.hc_norm.weight.data.copy_(torch.randn(256, generator=random) * 0.3)
    return made

def run(int8=False):
    "Three blocks and the mix at the end, as Qwen4ExpModel.forward strings them together. The second has no norm after it."
    a, b, c, end = build(1, int8), build(2, int8), build(3, int8), build(4, int8, False)
    random = torch.Generator().manual_seed(0)
    streams, normed = torch.randn(5, 256, generator=random).bfloat16(), None
    for block, norm in ((a, b.hc_norm), (b, None), (c, end.hc_norm)):
        mixed, residuals = block.mix(streams, normalized_input=normed)
        output = torch.tanh(mixed) + torch.randn(5, 64, generator=random).bfloat16()
        streams, normed = block.combine_and_normalize(output, residuals, norm)
        seen.append(normed is not None)
    return streams.float(), end.mix(streams, normalized_input=normed)[0].float()

seen, summed = [], []
real = hyper_boundary.fits, hyper_boundary.cross, hyper_boundary.gate_parts
def parts(normed, inject):
    summed.append(len(normed))
    return kernels.parts_reference(normed, inject).float()
def fused(int8=False):
    hyper_boundary.fits = lambda *a: True
    hyper_boundary.cross, hyper_boundary.gate_parts = kernels.boundary_reference, parts
    try:
        return run(int8)
    finally:
        hyper_boundary.fits, hyper_boundary.cross, hyper_boundary.gate_parts = real
distance = lambda x, y: float((x - y).norm() / y.norm())
"""


@pytest.mark.parametrize("int8", [False, True])
def test_a_chain_of_blocks_comes_out_as_from_sglang(sglang_child: Child, int8: bool) -> None:
    """SGLang rounds more between its plain operations than its kernels and these do, so the bits differ here."""
    apart, seen, summed = sglang_child.run(
        CHAIN
        + f"""
plain, seen = run({int8}), []
ours = fused({int8})
result = [[distance(x, y) for x, y in zip(ours, plain)], seen, summed]
"""
    )
    assert max(apart) < 8e-3
    assert seen == [True, False, True]
    # The first streams and those after the boundary without a norm were normalized by SGLang; only these are summed alone.
    assert summed == [5, 5]


def test_the_gates_that_the_sums_belong_to_are_those_of_the_next_block(sglang_child: Child) -> None:
    """With another block's gates in their place the streams are not the same."""
    apart = sglang_child.run(
        CHAIN
        + """
exact = fused()[0]
kept, hyper_boundary._NEXT = hyper_boundary._NEXT, "nobody"
forgotten = fused()[0]  # no sums are left behind: every boundary makes its own
hyper_boundary._NEXT = kept
other = build(9).block_inject_weight.weight.data
hyper_boundary.cross = kernels.boundary_reference
whole = kernels.boundary_reference
kernels.boundary_reference = lambda *a, inject=None, **k: whole(*a, inject=None if inject is None else other, **k)
wrong = fused()[0]
kernels.boundary_reference = whole
hyper_boundary.cross = real[1]
result = [distance(forgotten, exact), distance(wrong, exact)]
"""
    )
    assert apart[0] < 1e-6
    assert apart[1] > 1e-2


def test_on_a_cpu_everything_stays_sglangs(sglang_child: Child) -> None:
    same, normed, modules, parameters = sglang_child.run(
        CHAIN
        + """
a, b = build(1), build(2)
x, y = torch.randn(3, 256).bfloat16(), torch.randn(3, 64).bfloat16()
_, residuals = a.mix(x)
found, normed = a.combine_and_normalize(y, residuals, b.hc_norm)
original = GatedResidual.combine_and_normalize.__wrapped__(a, y, residuals, b.hc_norm)
result = [bool((found == original[0]).all()), normed, sum(1 for _ in a.modules()), sorted(n for n, _ in a.named_parameters())]
"""
    )
    assert same is True and normed is None
    # What a norm remembers is neither its child nor a second name for the weight.
    assert modules == 5 and parameters == [
        "block_inject_weight.weight",
        "hc_norm.weight",
        "input_mix_weight_down.weight",
        "input_mix_weight_up.weight",
    ]


class OnDevice(torch.Tensor):
    """Says that it lies on a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


def on_device(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Any:
    return torch.zeros(*shape, dtype=dtype).as_subclass(OnDevice)


def call(**changed: Any) -> bool:
    """Whether a call fits that differs in `changed` from one that does."""
    m, width = changed.get("m", 2), BRANCHES * HIDDEN
    block = SimpleNamespace(
        hc_count=BRANCHES,
        hidden_size=changed.get("hidden", HIDDEN),
        block_inject_weight=SimpleNamespace(weight=on_device(BRANCHES, width)),
    )
    norm = SimpleNamespace(weight=on_device(width), group_size=HIDDEN, variance_epsilon=1e-6)
    hyper_boundary.remember_gates(
        None, SimpleNamespace(hc_norm=norm, block_inject_weight=block.block_inject_weight)
    )
    for key, value in changed.get("norm", {}).items():
        setattr(norm, key, value)
    streams = on_device(m, width)
    residuals = (changed.get("streams", streams), changed.get("normed", streams), changed.get("partials"))
    output = changed.get("output", on_device(m, HIDDEN))
    return hyper_boundary.fits(block, output, residuals, None if changed.get("last") else norm)


def test_only_what_the_kernels_take_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hyper_boundary.nvrtc, "available", lambda: None)
    assert call() and call(m=1) and call(m=16) and call(last=True)
    width = BRANCHES * HIDDEN
    for changed in (
        {"m": 0},
        {"m": 17},
        {"partials": torch.zeros(2, 8, 4)},  # SGLang's own, of compute capability 10
        {"output": torch.zeros(2, HIDDEN).bfloat16()},
        {"output": on_device(2, HIDDEN, dtype=torch.float16)},
        {"output": on_device(1, 2, HIDDEN)},
        {"streams": on_device(width, 2).T},
        {"normed": on_device(1, width)},
        {"norm": {"group_size": None}},
        {"norm": {"weight": on_device(width, dtype=torch.float32)}},
        {"hidden": 256},
    ):
        assert not call(**changed), changed
    monkeypatch.setattr(hyper_boundary.nvrtc, "available", lambda: "no NVRTC")
    assert not call()
