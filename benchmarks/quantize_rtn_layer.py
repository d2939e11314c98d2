# ruff: noqa: T201  (a script)
"""One full-size block (all its experts) rounded to nearest on a CPU: seconds and peak resident memory.

    python -m benchmarks.quantize_rtn_layer WORKDIR --config assets/models/qwen3.8-flash-next.json

Writes a checkpoint of one block (5 GB; one random expert, as often as there are experts) and quantizes it with
`method: rtn`, which reads and packs one matrix at a time. Ends with exit code 1 above --limit.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.quantize_block_model import KINDS, cut_config, write
from q38.checkpoint.writer import tensor_bytes
from q38.quantize.driver import quantize
from q38.recipe.schema import parse_recipe


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workdir", type=Path)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, default=8.0, help="GiB")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = args.workdir / "source"
    if not (source / "model.safetensors").exists():
        write(source, cut_config(args.config, KINDS[:1]), _repeated)
    recipe = parse_recipe(
        {
            "schema": "q38.recipe/1",
            "name": "rtn-layer",
            "quantize": {
                "bits": {"experts": 2, "gdn_in": 8, "shared_expert": 8},
                "experts": {"method": "rtn"},
            },
        }
    )
    begun, cpu = time.monotonic(), time.process_time()
    result = quantize(source, args.workdir / "out", recipe, fresh=True)
    seconds, cpu = time.monotonic() - begun, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    matrices = result["bits"]["experts"]["2"]
    print(f"{matrices} expert matrices in {seconds:.0f} s ({cpu:.0f} CPU s), peak RSS {peak:.2f} GiB")
    sys.exit(peak > args.limit)


def _repeated(name: str, shape: tuple[int, ...]) -> Iterator[memoryview]:
    piece = 0.02 * torch.randn(shape[1:] if len(shape) == 3 and ".experts." in name else shape)
    data = tensor_bytes(piece.to(torch.bfloat16))
    for _ in range(shape[0] if len(shape) == 3 and ".experts." in name else 1):
        yield data


if __name__ == "__main__":
    main()
