"""Tokens generated one at a time, and the same tokens read as a prompt: two paths, one distribution."""

from __future__ import annotations

import numpy as np

from q38.measure.behaviour.row import Row, Unsupported, protocol
from q38.measure.behaviour.target import GENERATE, Target, input_logprobs
from q38.serving.client import ServerError

_TOKENS = 32
LIMIT = 0.05  # mean |difference| in nats: the oracle's limit for another order of summation
_PROMPT = "The keeper of the lighthouse wrote in his log that evening:"


def check(target: Target) -> list[Row]:
    """SGLang only: its /generate takes token ids and scores both ways."""
    if not target.native:
        raise Unsupported("the server offers no prompt log-probabilities (SGLang's /generate does)")
    where = target.client.url + GENERATE
    sampling = {"temperature": 0, "max_new_tokens": _TOKENS, "ignore_eos": True}
    base = {"return_logprob": True, "logprob_start_len": 0}
    first = target.client.post(GENERATE, {"text": _PROMPT, "sampling_params": sampling, **base})
    try:
        prompt = [int(entry[1]) for entry in first["meta_info"]["input_token_logprobs"]]
        generated = [int(entry[1]) for entry in first["meta_info"]["output_token_logprobs"]]
        decoded = [float(entry[0]) for entry in first["meta_info"]["output_token_logprobs"]]
    except (KeyError, TypeError, IndexError, ValueError):
        raise ServerError("the answer holds no log-probabilities", where=where) from None
    again = target.client.post(
        GENERATE,
        {
            "input_ids": prompt + generated,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1},
            **base,
        },
    )
    read = input_logprobs(again, where)[-len(generated) :]
    difference = np.abs(np.asarray(decoded) - np.asarray(read))
    mean, largest = float(difference.mean()), float(difference.max())
    faults = []
    if not mean <= LIMIT:
        faults.append(f"mean {mean:.3g}, max {largest:.3g} nats apart")
    return [
        protocol(
            "decode-prefill",
            faults,
            note=f"max {largest:.3g} nats",
            checked=len(generated),
            unit="tokens",
            value=mean,
            limit=LIMIT,
        )
    ]
