# ruff: noqa: T201  (a script)
"""The methods for routed experts on one small trained model, the same data for all: KL, NLL and seconds.

    q38 synth tiny tiny/trained --trained && q38 split-ple tiny/trained -o tiny/ple
    python -m benchmarks.quantize_methods tiny/trained --ple tiny/ple --work tiny/methods

Only the routed experts are at 2 bits ("W8": at 8); the dense matrices are as the recipe "tiny" has them. The floor is
the source in bfloat16. Each seed draws other calibration rows and other noise. Seconds are of the CPU where it tunes,
and on a GPU of the clock.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.index import read_json
from q38.hf.load import load_model, load_tokenizer
from q38.model.shape import ModelShape
from q38.model.text import load_texts, pack_tokens
from q38.quantize.calibration import calibration_tokens
from q38.quantize.driver import quantize
from q38.recipe.schema import Calibration, parse_recipe

ROWS: dict[str, dict[str, Any]] = {
    "rtn": {"method": "rtn"},
    "opt-rtn": {"method": "opt-rtn"},
    "autoround": {"method": "autoround", "alg_ext": False},
    "autoround alg_ext": {"method": "autoround", "alg_ext": True},
    "expert-local": {"method": "expert-local"},
    "expert-local-gsq": {"method": "expert-local-gsq"},
    "autoround best": {"method": "autoround", "alg_ext": False},
    "W8 rtn": {"method": "rtn"},
    "W8 autoround": {"method": "autoround", "alg_ext": False},
}
LENGTH = 128  # tokens of a calibration row
TWICE = ("expert-local-gsq",)  # as in the methods' defaults, 400 steps for 200
BEST = {"iters": 1000, "samples": 512}  # AutoRound's preset; from 1,000 steps on 2 bits get twice the rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("--ple", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--text", default="stdlib")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument(
        "--iters", type=int, default=100, help="tuning steps; twice as many for expert-local-gsq"
    )
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument(
        "--tokens", type=int, default=1024, help="per step; expert-local: per expert, by its share"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="cpu, or a GPU's number (it tunes in bfloat16)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    ids = held_out(args.source, args.text)
    reference = log_chances(load_model(args.source, ple=args.ple, dtype=torch.float32), ids)
    source = compare(reference, reference, ids)
    floor = compare(reference, log_chances(load_model(args.source, ple=args.ple), ids), ids)
    print(
        f"{ids[:, 1:].numel()} positions, NLL of the source {source['nll']:.4f}, floor KL (bfloat16) {floor['kl']:.5f}"
    )
    table: dict[str, list[dict[str, float]]] = {name: [] for name in args.rows}
    for seed in args.seeds:  # the outer loop, so that a run cut short has all methods
        for name in args.rows:
            if seed == 0 or "rtn" not in name.split():  # which uses no data
                table[name].append(one(args, name, seed, reference, ids))
    print("\n| method | KL to the source | NLL | top-1 | seconds |\n|---|---|---|---|---|")
    for name, runs in table.items():
        if not runs:
            continue
        kl, nll, top1, seconds = ([run[key] for run in runs] for key in ("kl", "nll", "top1", "seconds"))
        each = " ".join(f"{value:.4f}" for value in kl)
        print(
            f"| {name} | {statistics.mean(kl):.4f} ({each}) | {statistics.mean(nll):.4f} |"
            f" {statistics.mean(top1):.4f} | {statistics.mean(seconds):.0f} |"
        )


def held_out(source: Path, text: str) -> torch.Tensor:
    texts = load_texts(text, "held_out")
    return pack_tokens(texts.texts, load_tokenizer(source), length=256, count=32, where="held out").ids


def calibration(source: Path, text: str, samples: int, seed: int) -> torch.Tensor:
    """What `one` calibrates on, by seed."""
    recipe = Calibration(samples=samples, seqlen=LENGTH, seed=seed)
    return calibration_tokens(load_texts(text, "calibration"), load_tokenizer(source), recipe)[0]


def log_chances(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of the next token at every position but the last: [positions, vocabulary]."""
    with torch.inference_mode():
        rows = [model(input_ids=row[None]).logits[0, :-1].float().log_softmax(-1) for row in ids]
    return torch.cat(rows)


def compare(reference: torch.Tensor, ours: torch.Tensor, ids: torch.Tensor) -> dict[str, float]:
    return {
        "kl": float((reference.exp() * (reference - ours)).sum(-1).mean()),
        "nll": float(-ours.gather(1, ids[:, 1:].reshape(-1, 1)).mean()),
        "top1": float((reference.argmax(-1) == ours.argmax(-1)).float().mean()),
    }


def one(
    args: argparse.Namespace, name: str, seed: int, reference: torch.Tensor, ids: torch.Tensor
) -> dict[str, float]:
    """Quantize and compare; the result is kept in --work, so that a second call adds to the first."""
    iters, samples = (BEST["iters"], BEST["samples"]) if "best" in name else (args.iters, args.samples)
    done = args.work / f"{name.replace(' ', '-')}-{iters}-{samples}-{args.device}-{seed}.json"
    if done.exists():
        return dict(json.loads(done.read_text()))
    shape = ModelShape.from_config(read_json(args.source / "config.json"))
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "methods",
            "calibration": {
                "text": args.text,
                "samples": samples,
                "seqlen": LENGTH,
                "seed": seed,
            },
            "quantize": {
                "bits": {"experts": 8 if "W8" in name else 2, "gdn_in": 8, "shared_expert": 8},
                "experts": {
                    **ROWS[name],
                    "iters": iters * (2 if name in TWICE else 1),
                    "batch_size": args.tokens // LENGTH,
                    "rows": args.tokens * shape.num_experts_per_tok // shape.num_experts,
                },
            },
        }
    )
    out = args.work / f"model-{done.stem}"  # its own, so that several calls can run at once
    shutil.rmtree(out, ignore_errors=True)
    clock = time.process_time if args.device == "cpu" else time.monotonic
    begun = clock()
    quantize(args.source, out, recipe, ple=args.ple, threads=args.threads, device=args.device)
    seconds = clock() - begun
    ours = log_chances(load_model(out, ple=args.ple, dtype=torch.float32), ids)
    values = {**compare(reference, ours, ids), "seconds": seconds}
    print(name, seed, {key: round(value, 5) for key, value in values.items()}, flush=True)
    done.write_text(json.dumps(values))
    shutil.rmtree(out)
    return values


if __name__ == "__main__":
    main()
