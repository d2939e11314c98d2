"""The hyper-connections of SGLang with matrices that are rounded as they arrive."""

from __future__ import annotations

from tests.sglang_ext.conftest import Child

BUILD = """
import torch
from types import SimpleNamespace
from q38.sglang_ext import hyper_connections
from q38.sglang_ext.options import ExtensionOptions
from sglang.srt.layers.hyperconnection import GatedResidual, HyperConnectionConfig

def build(int8, loaded=None):
    hyper_connections.given = lambda: ExtensionOptions("m", int8_mixes=int8)
    made = GatedResidual(HyperConnectionConfig(4, 64, torch.bfloat16, False, 32, 1e-6, True))
    random = torch.Generator().manual_seed(0)
    for name in ("input_mix_weight_down", "input_mix_weight_up", "block_inject_weight"):
        parameter = getattr(made, name).weight
        shape = {"input_mix_weight_down": (32, 256), "input_mix_weight_up": (256, 32), "block_inject_weight": (4, 256)}[name]
        matrix = (torch.randn(shape, generator=random) * 0.3).bfloat16()
        loader = getattr(parameter, "weight_loader", None)
        loader(parameter, matrix) if loader else parameter.data.copy_(matrix)
    return made

x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
"""


def test_rounded_mixes_are_close_and_half_as_large(sglang_child: Child) -> None:
    error, without, sizes = sglang_child.run(
        BUILD
        + """
exact, rounded = (build(int8).mix(x)[0].float() for int8 in (False, True))
mean = x.float().view(6, 4, 64).mean(1) / 2
distance = lambda a: float((a - exact).norm() / exact.norm())
count = lambda m: sum(t.nbytes for t in (*m.parameters(), *m.buffers()))
result = [distance(rounded), distance(mean), [count(build(i)) for i in (False, True)]]
"""
    )
    assert 0 < error < 0.02 < without
    assert sizes[1] < 0.62 * sizes[0]  # norm and gate stay


def test_nothing_changes_unless_it_is_asked_for(sglang_child: Child) -> None:
    assert (
        sglang_child.run(BUILD + "result = str(build(False).input_mix_weight_down.weight.dtype)")
        == "torch.bfloat16"
    )
