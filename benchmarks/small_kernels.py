"""What one launch in place of several saves in a decode step: SGLang's launches beside q38's, in a CUDA graph of 48 layers.

    PYTHONPATH=. python benchmarks/small_kernels.py [--tokens 1 4 16] [--rounds 3] [--json FILE]

boundary   gates, combine and the next norm, twice a layer: three launches of SGLang, one of q38
with mix   the same and SGLang's mix before each, whose 13 MB of weights leave the cache cold
tail       the shared expert's gate and the sum with the routed ones, once a layer: one launch each

Every layer has weights and outputs of its own. "cold": so many copies of the 48 layers that one replay reads three times
the L2 cache; without it they stay in the cache, which a decode step does not allow. Each figure is the median of the
rounds, each round the median of 15 replays. "apart" is the part of the values that are not the same to the bit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.kernels.ops.elementwise.elementwise import fused_gate_sigmoid_mul_add
from sglang.kernels.ops.elementwise.hc_combine import hc_combine_split
from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix
from sglang.kernels.ops.layernorm.grouped_gemma_rmsnorm import grouped_gemma_rmsnorm

from q38.kernels.hyper_boundary import Norm, cross, gate_parts
from q38.kernels.shared_tail import add_shared
from q38.kernels.timing import graph_time

HIDDEN, BRANCHES, RANK, LAYERS = 2560, 4, 320, 48
WIDTH = BRANCHES * HIDDEN
Calls = list[Callable[[], object]]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


class Boundaries:
    """So many boundaries in a row, by SGLang and by q38; each reads what the one before left."""

    def __init__(self, count: int, tokens: int, *, mix: bool) -> None:
        self.norms = [Norm(random(WIDTH, scale=0.3), 1e-6) for _ in range(count)]
        self.inject = [random(BRANCHES, WIDTH, scale=0.02) for _ in range(count)]
        self.output = [random(tokens, HIDDEN, scale=0.3) for _ in range(count)]
        self.mixes = [
            (random(RANK, WIDTH, scale=0.01), random(WIDTH, RANK, scale=0.05)) for _ in range(count * mix)
        ]
        self.streams, self.normed = random(tokens, WIDTH), random(tokens, WIDTH)
        self.parts = gate_parts(self.normed, self.inject[-1])
        self.start = self.streams, self.normed, self.parts

    def _begin(self, i: int) -> None:
        if i == 0:
            self.streams, self.normed, self.parts = self.start
        if self.mixes:
            fused_hc_mix(self.normed, *self.mixes[i], BRANCHES, HIDDEN)

    def sglang(self, i: int) -> None:
        self._begin(i)
        combined = hc_combine_split(
            self.output[i], self.streams, self.normed, self.inject[i - 1], BRANCHES, HIDDEN
        )
        self.streams = combined
        self.normed = grouped_gemma_rmsnorm(combined, self.norms[i].weight, HIDDEN, self.norms[i].eps)

    def ours(self, i: int) -> None:
        self._begin(i)
        found = cross(self.output[i], self.streams, self.parts, norm=self.norms[i], inject=self.inject[i])
        assert found.normed is not None and found.parts is not None
        self.streams, self.normed, self.parts = found.combined, found.normed, found.parts

    def apart(self) -> float:
        """After the first boundary; later ones carry the difference on."""
        ends = []
        for call in (self.sglang, self.ours):
            call(0)
            ends.append(self.normed)
        return float((ends[0] != ends[1]).double().mean())

    def calls(self) -> tuple[Calls, Calls]:
        return tuple(
            [lambda i=i, call=call: call(i) for i in range(len(self.norms))]
            for call in (self.sglang, self.ours)
        )  # type: ignore[return-value]


class Tails:
    """So many sums of shared and routed experts."""

    def __init__(self, count: int, tokens: int) -> None:
        self.rows = [[random(tokens, HIDDEN) for _ in range(3)] for _ in range(count)]
        self.weights = [random(HIDDEN, scale=0.03) for _ in range(count)]

    def sglang(self, i: int) -> None:
        x, shared, routed = self.rows[i]
        fused_gate_sigmoid_mul_add(x, self.weights[i], shared, routed)

    def ours(self, i: int) -> None:
        x, shared, routed = self.rows[i]
        add_shared(x, self.weights[i], shared, routed)

    def apart(self) -> float:
        ends, routed = [], self.rows[0][2]
        for call in (self.sglang, self.ours):
            kept = routed.clone()
            call(0)
            ends.append(routed.clone())
            routed.copy_(kept)
        return float((ends[0] != ends[1]).double().mean())

    def calls(self) -> tuple[Calls, Calls]:
        return tuple(
            [lambda i=i, call=call: call(i) for i in range(len(self.rows))]
            for call in (self.sglang, self.ours)
        )  # type: ignore[return-value]


def copies(bytes_of_a_layer: int) -> int:
    """Of the 48 layers, until one replay reads three times the L2 cache."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return -(-3 * cache // (LAYERS * bytes_of_a_layer))


def measure(name: str, tokens: int, made: Any, a_layer: int, rounds: int) -> dict[str, Any]:
    """Microseconds a layer, of which there are `a_layer` calls."""
    made.sglang(0), made.ours(0)
    apart = made.apart()
    theirs, ours = (
        statistics.median(graph_time(calls) * a_layer * 1e6 for _ in range(rounds)) for calls in made.calls()
    )
    sys.stdout.write(
        f"{name:<18} M = {tokens:<3} SGLang {theirs:7.2f} us a layer   q38 {ours:7.2f}   ratio {theirs / ours:5.2f}"
        f"   a step {LAYERS * (theirs - ours) / 1e3:+6.3f} ms less   apart {apart:.1e}\n"
    )
    sys.stdout.flush()
    return {"what": name, "tokens": tokens, "sglang_us": theirs, "q38_us": ours, "apart": apart}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found = []
    for tokens in arguments.tokens:
        weights = 2 * 2 * (BRANCHES + 1) * WIDTH
        rows = 2 * 3 * tokens * HIDDEN
        for name, cold in (("", 1), (", cold", copies(weights)), (", with mix", 0)):
            made = Boundaries(2 * LAYERS * max(cold, 1), tokens, mix=not cold)
            found.append(measure("boundary" + name, tokens, made, 2, arguments.rounds))
            del made
        for name, cold in (("", 1), (", cold", copies(rows + 2 * HIDDEN))):
            found.append(measure("tail" + name, tokens, Tails(LAYERS * cold, tokens), 1, arguments.rounds))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
