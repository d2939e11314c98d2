"""Whether a server computes what transformers computes: log-probabilities of prompts and of decoded tokens.

    q38 synth full TINY                                                              # a small packed model
    PYTHONPATH=. python -m benchmarks.serve_agreement record TINY answers.json       # where the GPU is
    PYTHONPATH=. python -m benchmarks.serve_agreement compare TINY answers.json      # where transformers and AutoRound are
    PYTHONPATH=. python -m benchmarks.serve_agreement record TINY answers.json --device cpu --kv bf16

`record` starts one server for each KV format, has it score random texts, and lets it go on from them, greedy, step by
step; with `--at-once 5` all five at the same time, each in 12 GiB of the GPU. `compare` scores the same tokens, the decoded
ones included, with transformers in float32 on the same packed weights, and prints mean and largest |difference| in nats, beside the difference that bfloat16 alone makes in transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from q38.base.units import GIB
from q38.serving.launch import Server, running_server
from q38.serving.sglang_settings import SglangSettings

LENGTHS = (40, 200, 700, 1000)  # tokens; below the budget of the sparse attention all of them are attended to
DECODED = 64
GPU_MEMORY = 12 * GIB  # of each server
_SEED = 38


def texts(vocabulary: range) -> list[list[int]]:
    """The same random token ids everywhere."""
    chosen = random.Random(_SEED)
    return [[chosen.choice(vocabulary) for _ in range(length)] for length in LENGTHS]


def record(arguments: argparse.Namespace) -> None:
    """{format: [{"ids", "prompt": log-probabilities from the second token on, "decoded"}]} to the file."""
    found: dict[str, list[dict[str, Any]]] = {}
    with ThreadPoolExecutor(arguments.at_once) as pool:
        asked = {pool.submit(of_format, arguments, kv): kv for kv in arguments.kv.split(",")}
        for done in as_completed(asked):
            found[asked[done]] = done.result()
            arguments.answers.write_text(json.dumps(found))


def of_format(arguments: argparse.Namespace, kv: str) -> list[dict[str, Any]]:
    """The answers of a server of its own."""
    settings = SglangSettings(
        device=arguments.device, context=2048, chunk=512, kv=kv, resident=arguments.resident,
        gpu_memory=None if arguments.device == "cpu" else GPU_MEMORY,
    )  # fmt: skip
    log = arguments.logs / f"agreement-{kv}.log" if arguments.logs else None
    with running_server(arguments.model, engine="sglang", sglang=settings, log=log) as server:
        answers = [answer(server, ids) for ids in texts(range(10, 1000))]
    sys.stdout.write(f"recorded {kv}, ready after {server.load_s:.0f} s\n")
    sys.stdout.flush()
    return answers


def answer(server: Server, ids: list[int]) -> dict[str, Any]:
    """The prompt's scores and those of the tokens that the server decodes after it."""
    body = {
        "input_ids": ids, "return_logprob": True, "logprob_start_len": 0,
        "sampling_params": {"temperature": 0, "max_new_tokens": DECODED, "ignore_eos": True},
    }  # fmt: skip
    got = httpx.post(f"{server.url}/generate", json=body, timeout=600, trust_env=False)
    got.raise_for_status()
    meta = got.json()["meta_info"]
    return {
        "ids": ids + got.json()["output_ids"],
        "prompt": [entry[0] for entry in meta["input_token_logprobs"]][1:],
        "decoded": [entry[0] for entry in meta["output_token_logprobs"]],
    }


def compare(arguments: argparse.Namespace) -> None:
    """The table."""
    from q38.hf.load import load_model

    answers = json.loads(arguments.answers.read_text())
    exact = load_model(arguments.model, dtype=torch.float32)
    wanted = {kv: [score(exact, each["ids"]) for each in each_text] for kv, each_text in answers.items()}
    rounded = load_model(arguments.model, dtype=torch.bfloat16)
    first = next(iter(answers))
    noise = [
        np.abs(score(rounded, each["ids"]) - want)
        for each, want in zip(answers[first], wanted[first], strict=True)
    ]
    line("| KV cache | prompts, mean and largest | decoded, mean and largest |\n|---|---|---|")
    for kv, each_text in answers.items():
        pairs = list(zip(each_text, wanted[kv], strict=True))
        prompt = np.concatenate([np.abs(a["prompt"] - w[: len(a["prompt"])]) for a, w in pairs])
        decoded = np.concatenate([np.abs(a["decoded"] - w[len(a["prompt"]) :]) for a, w in pairs])
        line(f"| {kv} | {row(prompt)} | {row(decoded)} |")
    prompts = [n[: len(a["prompt"])] for n, a in zip(noise, answers[first], strict=True)]
    others = [n[len(a["prompt"]) :] for n, a in zip(noise, answers[first], strict=True)]
    line(f"| transformers, bf16 | {row(np.concatenate(prompts))} | {row(np.concatenate(others))} |")


def score(model: Any, ids: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Log-probability of each token but the first, [tokens - 1]."""
    from q38.hf.hooks import qsa_shortcut

    with torch.no_grad(), qsa_shortcut():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return logits[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0].numpy()


def row(differences: np.ndarray[Any, np.dtype[np.float64]]) -> str:
    return f"{differences.mean():.5f}, {differences.max():.3f} ({len(differences)} tokens)"


def line(text: str) -> None:
    sys.stdout.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("model", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--device", choices=["cuda", "cpu"])
    parser.add_argument("--kv", default="bf16,int8,int8ring_int4,int4,fp8")
    parser.add_argument("--at-once", type=int, default=1, help="servers that run at the same time")
    parser.add_argument("--resident", type=int, help="experts of each layer in device memory")
    parser.add_argument("--logs", type=Path, help="directory for the servers' logs")
    arguments = parser.parse_args()
    {"record": record, "compare": compare}[arguments.action](arguments)


if __name__ == "__main__":
    main()
