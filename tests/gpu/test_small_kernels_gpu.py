"""The boundary between two blocks on a real GPU, at the size of the release."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from q38.kernels.hyper_boundary import (
    Boundary,
    Norm,
    boundary_reference,
    cross,
    gate_parts,
    parts_reference,
)
from q38.kernels.reference import relative_error
from tests.gpu import beside

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU"),
]
BRANCHES, HIDDEN, LAYERS = 4, 2560, 48
WIDTH = BRANCHES * HIDDEN
TOKENS = [1, 2, 5, 16]
DTYPES = [torch.bfloat16, torch.float16]


def random(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).to(dtype)


def differ(a: torch.Tensor, b: torch.Tensor) -> float:
    """The part of the values that are not the same."""
    return float((a != b).double().mean())


def weights(dtype: torch.dtype) -> tuple[Norm, torch.Tensor]:
    return Norm(random(WIDTH, scale=0.3, dtype=dtype), 1e-6), random(BRANCHES, WIDTH, scale=0.02, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", TOKENS)
def test_a_boundary_is_that_of_the_reference(tokens: int, dtype: torch.dtype) -> None:
    torch.manual_seed(tokens)
    output, streams, normed = (
        random(tokens, HIDDEN, dtype=dtype),
        random(tokens, WIDTH, scale=2, dtype=dtype),
        random(tokens, WIDTH, dtype=dtype),
    )
    (norm, inject), (_, before) = weights(dtype), weights(dtype)
    parts = gate_parts(normed, before)
    assert relative_error(parts, parts_reference(normed, before)) < 1e-5
    for asked in ({"norm": norm, "inject": inject}, {"norm": norm}, {}):
        found, exact = (f(output, streams, parts, **asked) for f in (cross, boundary_reference))
        # All but the values that lie between two roundings.
        assert differ(found.combined, exact.combined) < 5e-3
        assert relative_error(found.combined, exact.combined) < 1e-3
        assert (found.normed is None, found.parts is None) == (exact.normed is None, exact.parts is None)
        if found.normed is not None and exact.normed is not None:
            assert differ(found.normed, exact.normed) < 1e-2
            assert relative_error(found.normed, exact.normed) < 1e-3
        if found.parts is not None and found.normed is not None:
            assert relative_error(found.parts, parts_reference(found.normed, inject)) < 1e-5
    plain = boundary_reference(torch.zeros_like(output), streams, parts, norm=norm)
    assert differ(plain.combined, cross(output, streams, parts).combined) > 0.5  # the output matters


def test_a_step_in_a_graph_has_the_bits_of_its_launches_one_by_one() -> None:
    """All launches of a step start before their predecessors end; a token's bits depend on no other token."""
    layers = [weights(torch.bfloat16) for _ in range(2 * LAYERS)]
    outputs = [random(16, HIDDEN) for _ in layers]
    streams, first = random(16, WIDTH), random(16, WIDTH)

    def step(tokens: int, *, wait: bool) -> Boundary:
        parts = gate_parts(first[:tokens], layers[-1][1])
        at, found = streams[:tokens], None
        for output, (norm, inject) in zip(outputs, layers, strict=True):
            if wait:
                torch.cuda.synchronize()
            found = cross(output[:tokens], at, parts, norm=norm, inject=inject)
            assert found.parts is not None
            at, parts = found.combined, found.parts
        assert found is not None
        return found

    alone = None
    for tokens in TOKENS:
        exact = step(tokens, wait=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = step(tokens, wait=False)
        for _ in range(5):
            for tensor in (found.combined, found.normed, found.parts):
                assert tensor is not None
                tensor.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert exact.normed is not None and exact.parts is not None
            assert torch.equal(found.combined, exact.combined)
            assert torch.equal(found.normed, exact.normed) and torch.equal(found.parts, exact.parts)
        alone = exact.combined[:1] if alone is None else alone
        assert torch.equal(exact.combined[:1], alone)


BESIDE_SGLANG = """
import json, sys, torch
from q38.kernels.hyper_boundary import Norm, cross, gate_parts
from q38.sglang_ext import hyper_boundary
try:
    from sglang.kernels.ops.elementwise.hc_combine import hc_combine_split
    from sglang.kernels.ops.layernorm.grouped_gemma_rmsnorm import grouped_gemma_rmsnorm
    from sglang.srt.layers.hyperconnection import GatedResidual, HyperConnectionConfig
    grouped_gemma_rmsnorm(torch.zeros(1, 512).bfloat16().cuda(), torch.zeros(512).bfloat16().cuda(), 512)
except (ImportError, RuntimeError, OSError) as error:
    print(json.dumps({"absent": str(error)[:300]}))
    sys.exit()

B, H = 4, 2560
random = lambda *shape, scale=1.0: (torch.randn(*shape, device="cuda") * scale).bfloat16()
differ = lambda a, b: float((a != b).double().mean())
near = lambda a, b: float((a.double() - b.double()).norm() / b.double().norm())
found = {}
for tokens in (1, 2, 5, 16):
    output, streams, normed, inject = random(tokens, H), random(tokens, B * H, scale=2), random(tokens, B * H), random(B, B * H, scale=0.02)
    norm = Norm(random(B * H, scale=0.3), 1e-6)
    ours = cross(output, streams, gate_parts(normed, inject), norm=norm, inject=inject)
    theirs = hc_combine_split(output, streams, normed, inject, B, H)
    after = grouped_gemma_rmsnorm(ours.combined, norm.weight, H, norm.eps)
    found[tokens] = {
        "combined": [differ(ours.combined, theirs), near(ours.combined, theirs)],
        "norm": [differ(ours.normed, after), near(ours.normed, after)],
    }

torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    blocks = [GatedResidual(HyperConnectionConfig(B, H, torch.bfloat16, False, 320, 1e-6, True)) for _ in range(3)]
for block in blocks:
    for parameter in block.parameters():
        parameter.data.copy_(random(*parameter.shape, scale=0.3 if parameter.ndim == 1 else 0.02))
    hyper_boundary.remember_gates(None, block)
original = GatedResidual.combine_and_normalize
ours = lambda *args: hyper_boundary.combine_and_normalize(original, *args)
for tokens in (1, 16, 17):
    start, outputs = random(tokens, B * H), [random(tokens, H) for _ in range(2)]
    ends, prepared = [], []
    for combine in (original, ours):
        streams, normed = start, None
        for block, following, output in zip(blocks, blocks[1:], outputs):
            mixed, residuals = block.mix(streams, normalized_input=normed)
            streams, normed = combine(block, output, residuals, following.hc_norm)
        ends.append(streams)
        prepared.append(normed is not None)
    found[f"chain {tokens}"] = [near(*ends), prepared[1]]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def beside_sglang() -> dict[str, Any]:
    """q38's kernels and SGLang's on the same inputs, in a process of its own: SGLang changes transformers."""
    return beside.run(BESIDE_SGLANG)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("what", ["combined", "norm"])
def test_results_are_those_of_sglangs_kernels(beside_sglang: dict[str, Any], tokens: int, what: str) -> None:
    """To the bit, but for values that the order of a sum moves over the edge between two roundings."""
    differ, near = beside_sglang[str(tokens)][what]
    assert differ < 2e-3 and near < 1e-3


@pytest.mark.parametrize("tokens", [1, 16, 17])
def test_sglangs_blocks_give_the_same_streams_with_the_hook(
    beside_sglang: dict[str, Any], tokens: int
) -> None:
    near, prepared = beside_sglang[f"chain {tokens}"]
    assert near < 1e-3
    assert prepared is (tokens <= 16)
