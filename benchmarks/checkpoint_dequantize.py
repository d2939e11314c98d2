# ruff: noqa: T201  (a script)
"""Unpacking a matrix to float32: `packing.dequantize` against the plain formula on unpacked codes, side by side.

    python -m benchmarks.checkpoint_dequantize [--rows 640 --columns 2560 --threads 1]

Both are run in turns on the same matrix and must give the same bits. The figure is the ratio of their medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from q38.checkpoint.packing import PackedMatrix, dequantize, unpack, unpack_zeros
from q38.quantize.rtn import round_to_nearest

GROUP = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=640)
    parser.add_argument("--columns", type=int, default=2560)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    weight = torch.randn(args.rows, args.columns, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4, 8):
        matrix = round_to_nearest(weight, bits, GROUP)
        assert torch.equal(plain(matrix, bits), dequantize(*matrix, bits))
        slow, fast = [], []
        for _ in range(args.repeats):
            slow.append(cpu_seconds(lambda matrix=matrix, bits=bits: plain(matrix, bits)))
            fast.append(cpu_seconds(lambda matrix=matrix, bits=bits: dequantize(*matrix, bits)))
        before, after = statistics.median(slow), statistics.median(fast)
        print(
            f"{bits} bits: plain {1e3 * before:.1f} ms, dequantize {1e3 * after:.1f} ms, ratio {before / after:.1f}"
        )


def plain(matrix: PackedMatrix, bits: int) -> torch.Tensor:
    """The formula of `q38.checkpoint.packing`, code by code: float32 [N, K]."""
    words, zeros, scales = matrix
    k, n = words.shape[0] * 32 // bits, words.shape[1]
    groups = scales.shape[0]
    codes = unpack(words, bits, k).view(groups, k // groups, n).to(torch.float32)  # [G, g, N]
    level = codes - unpack_zeros(zeros, bits).to(torch.float32)[:, None]
    return (level * scales.to(torch.float32)[:, None]).view(k, n).t().contiguous()


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


if __name__ == "__main__":
    main()
