"""What rounding the hyper-connections' mixes to INT8 moves: log-probabilities of shipped texts, with it against without.

    PYTHONPATH=. python benchmarks/int8_mixes.py MODEL --ple DIR [--device cpu] [--tokens 400]

One server after the other scores the same texts, token by token; the second run without it is the noise.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import httpx
import numpy as np

from q38.data import data_path
from q38.hf.load import load_tokenizer
from q38.serving.launch import running_server
from q38.serving.sglang_settings import SglangSettings

TEXTS = ("prose.en.txt", "code.txt", "prose.ja.txt")


def scores(arguments: argparse.Namespace, texts: list[list[int]], *, int8: bool) -> np.ndarray:
    """Log-probabilities in nats, float64 [tokens]."""
    settings = SglangSettings(
        device=arguments.device, context=arguments.tokens + 64, chunk=128, int8_mixes=int8
    )
    found: list[float] = []
    with running_server(
        arguments.model, ple=arguments.ple, name="m", engine="sglang", sglang=settings
    ) as server:
        for ids in texts:
            body = {
                "input_ids": ids,
                "sampling_params": {"max_new_tokens": 1},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answer = httpx.post(f"{server.url}/generate", json=body, timeout=600).raise_for_status().json()
            found += [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--ple", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--tokens", type=int, default=400, help="of each text")
    arguments = parser.parse_args()
    tokenizer = load_tokenizer(arguments.model)
    texts = [
        tokenizer(data_path("assets", "prompts", name).read_text())["input_ids"][: arguments.tokens]
        for name in TEXTS
    ]
    exact = scores(arguments, texts, int8=False)
    for name, int8 in (("noise", False), ("INT8 mixes", True)):
        apart = np.abs(scores(arguments, texts, int8=int8) - exact)
        sys.stdout.write(
            f"{name}: {len(apart)} tokens, mean |d| {apart.mean():.5f} nats, largest {apart.max():.4f}\n"
        )


if __name__ == "__main__":
    main()
