# ruff: noqa: T201  (a script)
"""One tuning step of each expert-local method, in plain torch and in its fused kernel, and where a batch's time goes.

python benchmarks/quantize_kernels.py --hidden 2560 --intermediate 640 --experts 16
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from q38.quantize.local import fused, gsq, signround, tune
from q38.quantize.local.grid import plain_scales, weights
from q38.quantize.local.gsq import Gsq
from q38.quantize.local.settings import Settings
from q38.quantize.local.signround import SignRound
from q38.quantize.local.tokens import Routed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--intermediate", type=int, required=True)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096, help="per expert")
    args = parser.parse_args()
    with torch.no_grad():
        steps(args.experts, 2 * args.intermediate, args.hidden)
        for method in ("expert-local", "expert-local-gsq"):
            parts(method, args)


def steps(experts: int, n: int, k: int) -> None:
    """Milliseconds of the elementwise part of a step for [experts, n, k], and GB/s of the fused one."""
    weight = 0.02 * torch.randn(experts, n, k, device="cuda").bfloat16()
    gradient = torch.randn_like(weight)
    base = torch.stack([plain_scales(w, 2, 128) for w in weight])
    rounding = SignRound(weight, base, bits=2, steps=200)
    levels = torch.randint(-2, 2, weight.shape, device="cuda", dtype=torch.int8)
    choice = Gsq(levels, base, list(range(experts)), bits=2, steps=400, dtype=torch.bfloat16)

    def plain_signround() -> None:
        for e in range(experts):
            signround.reference_update(rounding, weight, gradient, e, 1e-3, 2)
            rounding.current[e] = weights(*rounding.hard(e), torch.bfloat16)

    def plain_gsq() -> None:
        for e in range(experts):
            noise = -torch.empty(4, n, k, device="cuda").exponential_().clamp_(min=1e-9).log_()
            chances = gsq.choose(choice.logits[:, e], noise, 1.0, 200.0)
            gsq.reference_update(choice, chances, gradient[e], e, 100)
            choice.current[e] = gsq.soften(chances, choice.scale[e])

    timed("signround, plain torch", plain_signround)
    timed(
        "signround, fused",
        lambda: fused.signround(gradient, rounding, weight, 1e-3, 2, 128),
        14 * weight.numel(),
    )
    timed("gsq, plain torch", plain_gsq)
    timed("gsq, fused", lambda: fused.gsq(gradient, choice, 100), 52 * weight.numel())


def parts(method: str, args: argparse.Namespace) -> None:
    """Seconds of each part of tuning one batch of experts."""
    settings = Settings(method, 2, 128, 400 if "gsq" in method else 200, 256, 64, args.tokens, 0.1, 0)
    total, k = args.tokens * args.experts // 8, 8
    hidden = torch.randn(total, args.hidden, device="cuda").bfloat16()
    chosen = torch.rand(total, args.experts, device="cuda").topk(min(k, args.experts)).indices
    routed = Routed.of(hidden, chosen, torch.rand(chosen.shape, device="cuda"), args.experts)
    batch = tune.Weights(
        0.02 * torch.randn(args.experts, 2 * args.intermediate, args.hidden, device="cuda").bfloat16(),
        0.02 * torch.randn(args.experts, args.hidden, args.intermediate, device="cuda").bfloat16(),
    )
    clock = Clock()
    data = tune._Data.make(batch, routed, list(range(args.experts)), 0, settings)
    clock.lap("tokens and targets")
    rounders = tune._rounders(batch, data, settings)
    clock.lap("start (GPTQ)" if "gsq" in method else "start")
    judge = tune._Judge(data, rounders)
    judge.look(0)
    clock.lap("one judgement")
    for done in range(20):
        tune.step(data, rounders, done)
    clock.lap("20 steps")
    tune.step(data, rounders, 20)
    clock.lap("1 step")
    print(f"{method}, {args.experts} experts: {clock.text()}")


class Clock:
    def __init__(self) -> None:
        torch.cuda.synchronize()
        self._last, self._laps = time.monotonic(), list[str]()

    def lap(self, name: str) -> None:
        torch.cuda.synchronize()
        now = time.monotonic()
        self._laps.append(f"{name} {now - self._last:.3f} s")
        self._last = now

    def text(self) -> str:
        return ", ".join(self._laps)


def timed(name: str, run: Callable[[], None], moved: int = 0) -> None:
    """Median of 7 runs after a warm-up."""
    run()
    times = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    median = sorted(times)[3]
    print(f"{name}: {median:.3f} ms" + (f", {moved / median / 1e6:.0f} GB/s" if moved else ""))


if __name__ == "__main__":
    main()
