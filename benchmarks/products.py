"""Whether the matrix library multiplies right at a model's shapes on this GPU, all of it or a share of its SMs.

    PYTHONPATH=. python -m benchmarks.products DIR                                        # DIR holds a config.json
    CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=50 PYTHONPATH=. python -m benchmarks.products DIR    # under CUDA MPS

Under MPS, cuBLAS 13 was seen to leave a part of its results unwritten with most shares of an H200 (docs/performance.md):
every figure of a server under such a share would be a figure of wrong work. Exit code 1 where a product is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.model.shape import ModelShape

TOKENS = (*range(16, 2049, 64), 17, 1000, 1801, 1808, 2000, 2500, 3000, 3904, 4095, 4096)
LIMIT = 0.01  # relative error; bf16 operands with fp32 sums stay under 0.004


def shapes(shape: ModelShape) -> list[tuple[int, int]]:
    """(inputs, outputs) of the plain and unpacked matrices that a prompt step multiplies with, each once."""
    hidden, streams = shape.hidden_size, shape.hc_count * shape.hidden_size
    heads = shape.num_attention_heads * shape.head_dim
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    keys = shape.linear_num_key_heads * shape.linear_key_head_dim
    shared = shape.shared_expert_intermediate_size
    index = (shape.indexer_n_heads + shape.indexer_kv_heads) * shape.indexer_head_dim
    found = [
        (hidden, 2 * heads + 2 * shape.num_key_value_heads * shape.head_dim), (heads, hidden),  # attention, with its gate
        (hidden, index),
        (hidden, 2 * keys + 2 * values), (hidden, 2 * shape.linear_num_value_heads), (values, hidden),  # Gated DeltaNet
        (hidden, shape.num_experts), (hidden, 1), (hidden, 2 * shared), (shared, hidden),  # router, shared expert
        (streams, shape.hc_lowrank), (shape.hc_lowrank, streams), (streams, shape.hc_count),  # hyper-connections
    ]  # fmt: skip
    return sorted(set(found))


def wrong(sizes: list[tuple[int, int]], device: str = "cuda") -> Iterator[dict[str, float]]:
    """Products bf16 [tokens, K] x [K, N] that differ from float32 by more than LIMIT, or are not finite.

    Every row is checked by Freivalds' method: (x W) v against x (W v) with a random v, by sums that no matrix library makes.
    """
    torch.manual_seed(38)
    for k, n in sizes:
        weight = torch.randn(n, k, device=device, dtype=torch.bfloat16)
        v = torch.randn(n, 1, device=device)
        projected = (weight.float() * v).sum(0)  # [K]
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device=device, dtype=torch.bfloat16)
            want = (x.float() * projected).sum(1)  # [tokens]
            found = (torch.nn.functional.linear(x, weight).float() * v.T).sum(1)
            error = float((found - want).norm() / want.norm())
            if not error <= LIMIT:
                yield {"inputs": k, "outputs": n, "tokens": tokens, "error": error}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="directory with a config.json")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    try:
        config = read_json(arguments.model / "config.json")
    except InputError as error:
        parser.error(str(error))
    sizes = shapes(ModelShape.from_config(config))
    if arguments.device == "cuda":
        found = torch.cuda.get_device_properties(0)
        sys.stdout.write(
            f"{found.name}, {found.multi_processor_count} SMs, torch {torch.__version__}, cuBLAS of CUDA {torch.version.cuda}\n"
        )
    bad = list(wrong(sizes, arguments.device))
    for line in bad:
        sys.stdout.write(f"wrong: {json.dumps(line)}\n")
    sys.stdout.write(f"{len(bad)} of {len(sizes) * len(TOKENS)} products wrong\n")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
