"""What q38's launches save in a decode step: SGLang's beside q38's, in a CUDA graph of 48 layers.

    PYTHONPATH=. python benchmarks/small_kernels.py [--tokens 1 4 16] [--rounds 3] [--json FILE] [--sections mix boundary]

mix        97 mixes in a row, one of SGLang's launches or two of q38's each; microseconds of one mix
boundary   gates, combine and the next norm, twice a layer: three launches of SGLang, one of q38
with mix   the same and SGLang's mix before each, whose 13 MB of weights leave the cache cold
both       boundaries with a mix before each that they wait for and that waits for them, all SGLang's or all q38's

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
from sglang.kernels.ops.elementwise.hc_combine import hc_combine_split
from sglang.kernels.ops.gemm.hc_mix import fused_hc_mix
from sglang.kernels.ops.layernorm.grouped_gemma_rmsnorm import grouped_gemma_rmsnorm

from q38.kernels.hyper_boundary import Norm, cross, gate_parts
from q38.kernels.hyper_mix import mix
from q38.kernels.timing import copy_rate, graph_time

HIDDEN, BRANCHES, RANK, LAYERS = 2560, 4, 320, 48
WIDTH = BRANCHES * HIDDEN
Calls = list[Callable[[], object]]
Mix = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * scale).bfloat16()


def matrices(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """down and up of so many mixes."""
    return [(random(RANK, WIDTH, scale=0.04), random(WIDTH, RANK, scale=0.12)) for _ in range(count)]


def sglang_mix(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return fused_hc_mix(x, down, up, BRANCHES, HIDDEN)  # type: ignore[no-any-return]


def q38_mix(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return mix(x, down, up, BRANCHES)


class Mixes:
    """So many mixes in a row, of the same streams."""

    def __init__(self, count: int, tokens: int) -> None:
        self.x, self.weights = random(tokens, WIDTH), matrices(count)

    def apart(self) -> float:
        theirs, ours = (f(self.x, *self.weights[0]) for f in (sglang_mix, q38_mix))
        return float((theirs != ours).double().mean())

    def calls(self) -> tuple[Calls, Calls]:
        return tuple([lambda w=w, f=f: f(self.x, *w) for w in self.weights] for f in (sglang_mix, q38_mix))  # type: ignore[return-value]


class Boundaries:
    """So many boundaries in a row, by SGLang and by q38; each reads what the one before left.

    mixes: what each side calls before a boundary, if anything.
    chained: the mix's result is what the boundary adds.
    """

    def __init__(
        self, count: int, tokens: int, *, mixes: tuple[Mix, Mix] | None = None, chained: bool = False
    ) -> None:
        self.mixes, self.chained = mixes, chained
        self.norms = [Norm(random(WIDTH, scale=0.3), 1e-6) for _ in range(count)]
        self.inject = [random(BRANCHES, WIDTH, scale=0.02) for _ in range(count)]
        self.output = [random(tokens, HIDDEN, scale=0.3) for _ in range(count)]
        self.weights = matrices(count if mixes else 0)
        self.streams, self.normed = random(tokens, WIDTH), random(tokens, WIDTH)
        self.parts = gate_parts(self.normed, self.inject[-1])
        self.start = self.streams, self.normed, self.parts

    def _begin(self, i: int, side: int) -> torch.Tensor:
        """The output that the boundary adds."""
        if i == 0:
            self.streams, self.normed, self.parts = self.start
        mixed = self.mixes[side](self.normed, *self.weights[i]) if self.mixes else None
        return self.output[i] if mixed is None or not self.chained else mixed

    def sglang(self, i: int) -> None:
        output = self._begin(i, 0)
        combined = hc_combine_split(output, self.streams, self.normed, self.inject[i - 1], BRANCHES, HIDDEN)
        self.streams = combined
        self.normed = grouped_gemma_rmsnorm(combined, self.norms[i].weight, HIDDEN, self.norms[i].eps)

    def ours(self, i: int) -> None:
        output = self._begin(i, 1)
        found = cross(output, self.streams, self.parts, norm=self.norms[i], inject=self.inject[i])
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


def measure_mixes(tokens: int, rounds: int, rate: float) -> dict[str, Any]:
    """Microseconds a mix, of which a step has two a layer and one at its end; rate: of a device copy, bytes a second."""
    made = Mixes(2 * LAYERS + 1, tokens)
    apart = made.apart()
    theirs, ours = (statistics.median(graph_time(c) for _ in range(rounds)) for c in made.calls())
    nbytes = sum(w.nbytes for w in made.weights[0])
    sys.stdout.write(
        f"{'mix':<18} M = {tokens:<3} SGLang {theirs * 1e6:7.2f} us a mix   q38 {ours * 1e6:7.2f}   ratio {theirs / ours:5.2f}"
        f"   a step {len(made.weights) * (theirs - ours) * 1e3:+6.3f} ms less   apart {apart:.1e}"
        f"   weights alone {nbytes / theirs / 1e9:.0f} and {nbytes / ours / 1e9:.0f} GB/s,"
        f" {nbytes / theirs / rate:.2f} and {nbytes / ours / rate:.2f} of a copy's {rate / 1e9:.0f}\n"
    )
    sys.stdout.flush()
    return {
        "what": "mix",
        "tokens": tokens,
        "sglang_us": theirs * 1e6,
        "q38_us": ours * 1e6,
        "apart": apart,
        "bytes": nbytes,
        "copy_rate": rate,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--sections", nargs="+", choices=["mix", "boundary"], default=["mix", "boundary"], metavar="SECTION"
    )
    arguments = parser.parse_args()
    found, count = [], 2 * LAYERS
    rate = copy_rate() if "mix" in arguments.sections else 0.0
    for tokens in arguments.tokens:
        if "mix" in arguments.sections:
            found.append(measure_mixes(tokens, arguments.rounds, rate))
        if "boundary" not in arguments.sections:
            continue
        cold = copies(2 * 2 * (BRANCHES + 1) * WIDTH)
        kinds: tuple[tuple[str, int, dict[str, Any]], ...] = (
            ("", 1, {}),
            (", cold", cold, {}),
            (", with mix", 1, {"mixes": (sglang_mix, sglang_mix)}),
            (", both", 1, {"mixes": (sglang_mix, q38_mix), "chained": True}),
        )
        for name, times, options in kinds:
            made = Boundaries(count * times, tokens, **options)
            found.append(measure("boundary" + name, tokens, made, 2, arguments.rounds))
            del made
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
