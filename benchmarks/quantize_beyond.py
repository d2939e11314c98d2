# ruff: noqa: T201  (a script)
"""What else could be done at the bytes of W2: variants of the expert-local methods on one small trained model.

    python -m benchmarks.quantize_beyond SOURCE --ple PLE --out FILE [--rows NAME ...] [--device cuda]

Each variant runs block by block in memory, without packing files: calibration and held-out tokens pass through the same
quantized blocks. KL, NLL and top-1 are over the held-out tokens, against the source, in float32; standard errors are
clustered by sequence. The data are those of `benchmarks.quantize_methods`, which measures AutoRound.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.quantize_methods import LENGTH, calibration, held_out
from benchmarks.quantize_variants import ROWS, Row, plain, varied
from q38.checkpoint.index import Checkpoint
from q38.hf.blocks import BlockModel
from q38.quantize.local import tune
from q38.quantize.local.block import Batch, outputs, quantize_batch, quantize_experts
from q38.quantize.local.settings import Settings
from q38.quantize.local.store import Expert, Store
from q38.quantize.local.walk import Half, Walk
from q38.quantize.plan import Plan, make_plan
from q38.quantize.torch_state import fixed_torch
from q38.recipe.schema import Experts, parse_recipe

DENSE = {"gdn_in": 8, "shared_expert": 8}


class Bench:
    """A source, held-out tokens, and what the source makes of them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.device = args, torch.device(args.device)
        self.ids = held_out(args.source, args.text)
        recipe = parse_recipe(
            {"schema": "q38.recipe/1", "name": "beyond", "quantize": {"bits": {"experts": 2, **DENSE}}}
        )
        self.plan: Plan = make_plan(Checkpoint.open(args.source), recipe)
        self.model = BlockModel(args.source, ple=args.ple, dtype=torch.float32, device=args.device)
        states = torch.split(self.model.embed(self.ids), 8)
        ids = torch.split(self.ids, 8)
        for block in range(self.plan.shape.num_layers):
            with self.model.block(block) as whole:
                states = tuple(whole(x, i) for x, i in zip(states, ids, strict=True))
        self.reference = self.chances(list(torch.split(torch.cat(states), 1)))

    def chances(self, states: list[torch.Tensor]) -> torch.Tensor:
        """Log-probabilities of the next token [sequences, T - 1, vocabulary] from what leaves the last block."""
        with self.model.head() as (mixer, matrix):
            rows = [
                (mixer(x.to(self.device))[0, :-1] @ matrix.T).float().log_softmax(-1).cpu() for x in states
            ]
        return torch.stack(rows)

    def settings(self, row: Row, seed: int) -> Settings:
        method = row.method if row.method != "rtn" else "opt-rtn"
        steps = max(1, round(self.args.steps * row.steps))
        shape = self.plan.shape
        rows = self.args.tokens * shape.num_experts_per_tok // shape.num_experts
        experts = Experts(method=method, iters=steps, rows=rows)  # type: ignore[arg-type]
        settings = Settings.of(experts, bits=2, group_size=self.plan.group_size, seed=seed)
        return dataclasses.replace(settings, **row.changes)

    def run(self, row: Row, seed: int) -> dict[str, float]:
        ids = calibration(self.args.source, self.args.text, self.args.samples, seed)
        options = {"dtype": torch.float32, "device": self.device}
        walks = [Walk(self.args.source, self.plan, self.args.ple, i, **options) for i in (ids, self.ids)]
        states = [walk.start() for walk in walks]
        begun = time.process_time(), time.monotonic()
        for block in range(self.plan.shape.num_layers):
            halves = [walk.half(block, x) for walk, x in zip(walks, states, strict=True)]
            settings = dataclasses.replace(self.settings(row, seed), bits=row.wide.get(block, 2))
            experts = self.experts(block, walks[0], halves[0], row, settings)
            states = [
                walk.whole(half, outputs(experts, half.routed, settings.bits))
                for walk, half in zip(walks, halves, strict=True)
            ]
        cpu, wall = time.process_time() - begun[0], time.monotonic() - begun[1]
        return {**self.compare(self.chances(states[1])), "cpu": cpu, "wall": wall}

    def experts(self, block: int, walk: Walk, half: Half, row: Row, settings: Settings) -> dict[int, Expert]:
        count = self.plan.shape.num_experts

        def load(which: list[int], where: torch.device) -> tune.Weights:
            return walk.experts(block, which, where)

        with tempfile.TemporaryDirectory() as scratch, varied(row, settings.steps):
            if row.method == "rtn":
                return plain(load(list(range(count)), self.device), settings)
            found = quantize_experts(
                block, load, half.routed, settings, at_once=count, devices=[self.device], store=Store(Path(scratch))
            )  # fmt: skip
            if row.worst is not None:
                share, factor = row.worst
                tuned = sorted(
                    (e for e in found if found[e].after is not None), key=lambda e: -(found[e].after or 0)
                )
                worst = sorted(tuned[: max(1, int(share * len(tuned)))])
                more = dataclasses.replace(settings, steps=int(settings.steps * factor))
                again = quantize_batch(block, Batch(worst, True), load(worst, self.device), half.routed, more)
                found |= {e: a for e, a in again.items() if (a.after or 0) < (found[e].after or 0)}
            return found

    def compare(self, ours: torch.Tensor) -> dict[str, float]:
        reference, ids = self.reference, self.ids
        kl = (reference.exp() * (reference - ours)).sum(-1).mean(1)  # [sequences]
        nll = -ours.gather(2, ids[:, 1:, None]).mean()
        top1 = (reference.argmax(-1) == ours.argmax(-1)).float().mean()
        error = float(kl.std()) / math.sqrt(len(kl))
        return {"kl": float(kl.mean()), "error": error, "nll": float(nll), "top1": float(top1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--ple", type=Path)
    parser.add_argument("--text", default="stdlib")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines; rows that are there are kept")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--samples", type=int, default=64, help=f"calibration rows of {LENGTH} tokens")
    parser.add_argument("--tokens", type=int, default=512, help="per step; per expert, by its share")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds after which no further run begins")
    args = parser.parse_args()
    begun = time.monotonic()
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {(r["row"], r["seed"], r["steps"]): r for r in map(json.loads, lines)}
    with torch.no_grad(), fixed_torch(args.threads):
        bench = Bench(args)
        print("the source against itself", bench.compare(bench.reference), flush=True)
        for seed in args.seeds:  # the outer loop, so that a run cut short has all rows
            for name in args.rows:
                key = (name, seed, args.steps)
                if key in done or (seed and name == "rtn") or time.monotonic() - begun > args.budget:
                    continue
                done[key] = {"row": name, "seed": seed, "steps": args.steps, **bench.run(ROWS[name], seed)}
                print(json.dumps(done[key]), flush=True)
                with args.out.open("a") as file:
                    file.write(json.dumps(done[key]) + "\n")
    print_table([r for r in done.values() if r["steps"] == args.steps])


def print_table(rows: list[dict[str, Any]]) -> None:
    print("\n| variant | KL (each seed) | standard error | NLL | top-1 | s |\n|---|---|---|---|---|---|")
    for name in dict.fromkeys(row["row"] for row in rows):
        own = [row for row in rows if row["row"] == name]

        def mean(key: str, own: list[dict[str, Any]] = own) -> float:
            return statistics.mean(row[key] for row in own)

        each = " ".join(f"{row['kl']:.5f}" for row in own)
        print(
            f"| {name} | {mean('kl'):.5f} ({each}) | {mean('error'):.5f} | {mean('nll'):.4f} |"
            f" {mean('top1'):.4f} | {mean('wall'):.1f} |"
        )


if __name__ == "__main__":
    main()
