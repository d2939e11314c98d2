# ruff: noqa: T201  (a script)
"""Real-size blocks tuned on a GPU: seconds, peak memory and output error of every method, and what 48 blocks take.

    python benchmarks/quantize_block.py WORKDIR --config assets/models/qwen3.8-flash-next.json --device cuda

Writes two blocks of random weights (10 GB), runs each without its experts on a random residual stream, quantizes its experts by
each method, with the device's memory capped and not, and compares the experts' summed output with the source's on
other tokens. "autoround" is AutoRound itself on the whole block, "block-wise" this script's own SignRound of all experts of
a block together on the block's output. On a CPU, with a small config, it is a rehearsal.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantize_block_autoround import autoround
from benchmarks.quantize_block_model import KINDS, residual_stream, write_blocks
from benchmarks.quantize_block_wise import block_wise
from q38.checkpoint.index import Checkpoint
from q38.quantize.local.block import outputs, quantize_experts
from q38.quantize.local.memory import Sizes, experts_at_once, free_bytes
from q38.quantize.local.moe import activate
from q38.quantize.local.settings import Settings
from q38.quantize.local.store import Store
from q38.quantize.local.tokens import Routed, coverage
from q38.quantize.local.walk import Half, Walk
from q38.quantize.plan import make_plan
from q38.quantize.torch_state import compute_dtype, fixed_torch
from q38.recipe.schema import Experts, parse_recipe

GIB = 2**30
CARD = {"bandwidth": 672e9, "flops": 100e12}  # a 24 GB card: GB/s, dense bf16 FLOP/s
H200_BANDWIDTH = 4.1e12  # copy, read + write
BLOCKS = 48


class Bench:
    """One checkpoint of two blocks, and tokens to tune and to judge on."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.device = torch.device("cuda:0" if args.device == "cuda" else args.device)
        self.cuda = self.device.type == "cuda"
        self.started = time.monotonic()
        self.rows: list[dict[str, Any]] = []
        self.context = 0  # bytes of the device that are not torch's to count
        if self.cuda:
            torch.zeros(1, device=self.device)
            free, total = torch.cuda.mem_get_info()
            self.context = total - free - torch.cuda.memory_reserved()
        self.source = source = args.workdir / "source"
        if not (source / "config.json").exists():
            write_blocks(source, args.config, args.kinds, seed=0, device=args.device)
            self.say(f"wrote {source}")
        bits = {"experts": 2, "gdn_in": 8, "shared_expert": 8}
        self.recipe = parse_recipe(
            {
                "schema": "q38.recipe/1",
                "name": "block",
                "calibration": {"samples": args.samples, "seqlen": args.seqlen},
                "quantize": {"bits": bits},
            }
        )
        self.plan = make_plan(Checkpoint.open(source), self.recipe)
        options = {"dtype": compute_dtype(args.device), "device": self.device}
        judged = max(1, args.samples // 16)
        self.walk, self.judge = (
            Walk(source, self.plan, None, torch.zeros(samples, args.seqlen, dtype=torch.int64), **options)
            for samples in (args.samples, judged)
        )
        self.states, self.judge_states = self.stream(1, args.samples), self.stream(2, judged)

    def stream(self, seed: int, samples: int) -> list[torch.Tensor]:
        """What enters the first block."""
        dtype = compute_dtype(self.args.device)
        return residual_stream(
            samples, self.args.seqlen, self.plan.shape, seed=seed, device=self.args.device, dtype=dtype
        )

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def sync(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.monotonic()

    def clean(self, cap: float | None = None) -> None:
        gc.collect()
        if not self.cuda:
            return
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction((cap * GIB - self.context) / total if cap else 1.0)
        torch.cuda.reset_peak_memory_stats()

    def peak(self) -> float:
        """GiB of the device at most since `clean`: what torch reserved, and the context."""
        if not self.cuda:
            return 0.0
        return float((torch.cuda.max_memory_reserved() + self.context) / GIB)

    def settings(self, method: str, options: list[str]) -> Settings:
        """The default settings of a method, changed by options like "steps=800"."""
        experts = Experts(method=method, iters=self.args.steps)  # type: ignore[arg-type]
        settings = Settings.of(experts, bits=2, group_size=self.plan.group_size, seed=0)
        changes = dict(option.split("=") for option in options if "=" in option)
        return dataclasses.replace(
            settings, **{key: _like(getattr(settings, key), value) for key, value in changes.items()}
        )

    def error(self, block: int, routed: Routed, got: torch.Tensor) -> float:
        """Squared error of the experts' summed output over the squared output, on the judging tokens."""
        wanted = self.reference(block, routed)
        return float((got.float() - wanted).square().sum() / wanted.square().sum())

    def reference(self, block: int, routed: Routed) -> torch.Tensor:
        """What the source's experts return: float32 [T, H]."""
        out = torch.zeros(routed.hidden.shape, device=self.device)
        for e in range(self.plan.shape.num_experts):
            weights = self.walk.experts(block, [e], self.device)
            token, weight = routed.of_expert(e)
            y = activate(routed.hidden[token] @ weights.gate_up[0].T) @ weights.down[0].T
            out[token] += y.float() * weight.unsqueeze(-1)
        return out

    def expert_local(
        self, block: int, half: Half, judged: Routed, method: str, options: list[str], rest: float
    ) -> torch.Tensor:
        """One method on one block; returns the experts' output on the calibration tokens."""
        cap = self.args.cap if "capped" in options else None
        self.clean(cap)
        settings = self.settings(method, options)
        shape = self.plan.shape
        sizes = Sizes(
            shape.hidden_size, shape.moe_intermediate_size, shape.num_experts, shape.num_experts_per_tok,
            len(half.routed.hidden),
        )  # fmt: skip
        # What the block left on the device is counted by the formula already.
        own = half.routed.hidden.nbytes + half.injection.nbytes
        at_once = experts_at_once(sizes, settings, free_bytes(self.device) + own, cuda=self.cuda)
        scratch = self.args.workdir / f"{block}-{method}-{'-'.join(options)}"
        scratch.mkdir(parents=True, exist_ok=True)
        begun = self.sync()
        experts = quantize_experts(
            block, lambda which, where: self.walk.experts(block, which, where), half.routed, settings,
            at_once=at_once, devices=[self.device], store=Store(scratch),
        )  # fmt: skip
        tuned = self.sync()
        out = outputs(experts, half.routed, settings.bits)
        done = self.sync()
        measured = [e for e in experts.values() if e.before is not None and e.after is not None]
        self.record(
            block,
            " ".join([method, *options]),
            cap,
            seconds=done - begun + rest,
            tuning=tuned - begun,
            steps=settings.steps,
            peak=self.peak(),
            error=self.error(block, judged, outputs(experts, judged, settings.bits)),
            at_once=at_once,
            before=sum(e.before or 0 for e in measured) / max(1, len(measured)),
            after=sum(e.after or 0 for e in measured) / max(1, len(measured)),
        )
        return out

    def record(self, block: int, method: str, cap: float | None, **values: Any) -> None:
        row = {"block": block, "kind": self.args.kinds[block], "method": method, "cap_gib": cap, **values}
        self.rows.append(row)
        self.say(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}))
        if self.args.out:
            (self.args.out / "quantize_block.json").write_text(json.dumps(self.rows, indent=1))

    def late(self) -> bool:
        return time.monotonic() - self.started > self.args.budget


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--steps", type=int, help="for all methods; default: each method's own")
    parser.add_argument("--kinds", nargs="*", default=KINDS, help="layer types of the blocks")
    parser.add_argument("--blocks", type=int, nargs="*", default=[0, 1], help="of them, those to tune")
    parser.add_argument("--cap", type=float, default=23.0, help="GiB of device memory of the capped runs")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further run begins")
    parser.add_argument("--out", type=Path, help="directory for quantize_block.json")
    parser.add_argument("--methods", nargs="*", default=METHODS)
    args = parser.parse_args()
    with torch.no_grad(), fixed_torch(torch.get_num_threads()):
        bench = Bench(args)
        states, judged_states = bench.states, bench.judge_states
        for block in range(max(args.blocks) + 1):
            states, judged_states = one_block(bench, block, states, judged_states)
    print_table(bench.rows, work(bench))


# After the method, changes of its settings ("steps=800"); "capped" holds the device's memory under --cap.
METHODS = [
    "expert-local", "block-wise", "expert-local-gsq", "expert-local capped", "expert-local-gsq capped", "opt-rtn",
]  # fmt: skip


def one_block(
    bench: Bench, block: int, states: list[torch.Tensor], judged_states: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """All methods on one block; returns what enters the next one, by the first method."""
    begun = bench.sync()
    half = bench.walk.half(block, states)
    forward = bench.sync() - begun
    judged_half = bench.judge.half(block, judged_states)
    bench.say(f"block {block}: forward {forward:.1f} s, tokens per expert {coverage(half.routed.counts)}")
    nothing = torch.zeros_like(judged_half.routed.hidden)
    assert bench.error(block, judged_half.routed, nothing) == 1.0
    following = None
    if block in bench.args.blocks:
        for name in bench.args.methods:
            if bench.late():
                bench.say(f"no time left for {name}")
                continue
            method, *options = name.split()
            if method in ("autoround", "block-wise"):
                try:
                    result = whole_block(bench, block, half, judged_half, method, options, forward)
                except Exception:  # noqa: BLE001  the other methods have their turn all the same
                    bench.say(f"{name} failed:\n{traceback.format_exc()}")
                else:
                    bench.record(block, name, None, **result)
                continue
            out = bench.expert_local(block, half, judged_half.routed, method, options, forward)
            following = out if following is None else following
            del out
    if following is None:
        following = torch.zeros_like(half.routed.hidden)
    bench.clean()
    return bench.walk.whole(half, following), bench.judge.whole(judged_half, nothing)


def whole_block(
    bench: Bench, block: int, half: Half, judged: Half, method: str, options: list[str], forward: float
) -> dict[str, Any]:
    """A method that tunes all experts of the block together."""
    bench.clean()
    if method == "autoround":
        assert block == 0, "AutoRound's inputs are those of the first block"
        # Its inputs are made again: the walk let go of them.
        return autoround(bench, block, bench.stream(1, bench.args.samples), judged.routed, options)
    steps = int(dict(o.split("=") for o in options if "=" in o).get("steps", bench.args.steps or 200))
    result = block_wise(bench, block, half.routed, judged.routed, steps=steps)
    return {**result, "seconds": result["seconds"] + forward}


def _like(example: Any, value: str) -> Any:
    return value if isinstance(example, str) else type(example)(float(value))


def work(bench: Bench) -> dict[str, float]:
    shape = bench.plan.shape
    return {
        "weights": 3.0 * shape.hidden_size * shape.moe_intermediate_size * shape.num_experts,
        "rows": float(dataclasses.asdict(bench.settings("expert-local", []))["rows"]),
    }


def card_seconds(row: dict[str, Any], sizes: dict[str, float]) -> float:
    """DERIVED seconds per block on the card: tuning at its bandwidth and rate, one after the other; all else as
    measured, slowed by the ratio of the bandwidths."""
    kernel = 52 if "gsq" in row["method"] else 14
    # Beside the kernel, products read the weights (2 bytes, the second matrix twice) and write gradients.
    moved = sizes["weights"] * row["steps"] * (kernel + 2 + 2 / 3 + 2)
    flops = sizes["weights"] * row["steps"] * sizes["rows"] * (2 + 2 + 2 / 3)
    rest = row["seconds"] - row["tuning"]
    return moved / CARD["bandwidth"] + flops / CARD["flops"] + rest * H200_BANDWIDTH / CARD["bandwidth"]


def print_table(rows: list[dict[str, Any]], sizes: dict[str, float]) -> None:
    print(
        "\n| block | method | cap GiB | experts at once | s/block | peak GiB | output error | card s/block (DERIVED) | 48 blocks h |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        card = card_seconds(row, sizes) if row["method"].startswith("expert-local") else None
        derived = f"{card:.0f} | {card * BLOCKS / 3600:.1f}" if card else "- | -"
        print(
            f"| {row['kind']} | {row['method']} | {row['cap_gib'] or '-'} | {row.get('at_once', '-')} |"
            f" {row['seconds']:.1f} | {row['peak']:.1f} | {row['error']:.4f} | {derived} |"
        )


if __name__ == "__main__":
    main()
