# ruff: noqa: T201  (a script)
"""One full-size block by `q38 quantize` on one GPU and on two: seconds, and whether they write the same bytes.

    q38 synth tiny tiny/source
    python -m benchmarks.quantize_two_gpus WORKDIR --config assets/models/qwen3.8-flash-next.json --tokenizer tiny/source

"0,0" is one GPU with the batches of two: what differs from it is the second GPU, what differs from "0" may be the
size of a batch. On a CPU, with a small config and `--devices cpu cpu`, it is a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
from pathlib import Path

import torch

from benchmarks import quantize_block_model as model
from q38.checkpoint.index import Checkpoint
from q38.quantize.driver import quantize
from q38.recipe.schema import Recipe, parse_recipe

TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a checkpoint with a small vocabulary")
    parser.add_argument("--devices", nargs="*", default=["0", "0,1", "0,0"])
    parser.add_argument("--kind", default="linear_attention", help="layer type of the block")
    parser.add_argument("--method", default="expert-local")
    parser.add_argument("--iters", type=int, default=200)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--out", type=Path, help="file for the figures")
    args = parser.parse_args()
    source = args.workdir / "source"
    begun = time.monotonic()
    if not (source / "config.json").exists():
        write_source(source, args)
    print(f"wrote {source} in {time.monotonic() - begun:.1f} s", flush=True)
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "two GPUs",
            "calibration": {"text": "stdlib", "samples": args.samples, "seqlen": args.seqlen},
            "quantize": {
                "bits": {"experts": 2, "gdn_in": 8, "shared_expert": 8},
                "experts": {"method": args.method, "iters": args.iters},
            },
        }
    )
    rows = []
    for number, device in enumerate(args.devices):
        rows.append(one(source, args.workdir / f"out-{number}", recipe, device))
        rows[-1]["differs from"] = {
            args.devices[other]: compare(args.workdir / f"out-{other}", args.workdir / f"out-{number}")
            for other in range(number)
        }
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            args.out.write_text(json.dumps(rows, indent=1))


def write_source(out: Path, args: argparse.Namespace) -> None:
    """A checkpoint of one block with a tokenizer, and embeddings of its whole vocabulary."""
    text = json.loads((args.tokenizer / "config.json").read_text())
    model.VOCABULARY = text.get("text_config", text)["vocab_size"]
    cuda = torch.cuda.is_available()
    model.write_blocks(out, args.config, [args.kind], seed=0, device="cuda" if cuda else "cpu")
    for name in TOKENIZER:
        if (args.tokenizer / name).exists():
            shutil.copy(args.tokenizer / name, out)


def one(source: Path, out: Path, recipe: Recipe, device: str) -> dict[str, object]:
    """A run from nothing; seconds of all of it and of its block, and the peak of the fullest GPU."""
    shutil.rmtree(out, ignore_errors=True)
    begun = time.monotonic()
    result = quantize(source, out, recipe, device=device)
    seconds = time.monotonic() - begun
    block = result["blocks"][0]
    return {
        "device": device,
        "seconds": round(seconds, 1),
        "seconds of the block": round(block["seconds"], 1),
        "peak GiB": round(block.get("device_peak", 0) / 2**30, 1),
        "loss": block.get("loss_after"),
    }


def compare(ours: Path, theirs: Path) -> dict[str, float]:
    """Tensors that differ, of how many, and the share of their bytes that do."""
    a, b = Checkpoint.open(ours), Checkpoint.open(theirs)
    assert set(a.tensors) == set(b.tensors)
    tensors = wrong = size = 0
    for name in a.tensors:
        x, y = (c.read(name).contiguous().view(torch.uint8) for c in (a, b))
        different = int((x != y).sum())
        tensors, wrong, size = tensors + bool(different), wrong + different, size + x.numel()
    return {"tensors": tensors, "of": len(a.tensors), "share of bytes": wrong / size}


if __name__ == "__main__":
    main()
