"""The engine that scores through a running SGLang server: its kernels, its KV cache, its chunks.

`POST /generate` takes token ids and returns the log-probability of each (return_logprob, REPORTED in
SGLang's documentation of its native API, sampling_params.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from q38.base.errors import InputError
from q38.base.progress import SILENT, Progress
from q38.measure.behaviour.target import GENERATE, server_settings
from q38.measure.oracle_prompts import Item
from q38.serving.client import Client, ServerError

_MODEL_INFO = ("/model_info", "/get_model_info")  # newer name first


class SglangEngine:
    """A server. Close it, or use it as a context manager.

    Args:
        url: its root. model: the directory that it is said to serve, whose tokenizer made the ids.

    Raises:
        InputError: it is not SGLang, or serves another directory. ResourceError: no server answers.
    """

    takes_states = False

    def __init__(self, url: str, model: Path, *, api_key: str | None = None, stall_s: float = 600.0) -> None:
        self.client = Client(url, api_key=api_key, stall_s=stall_s)
        try:
            self.client.models()
            self.settings = server_settings(self.client)
            if not self.settings:
                raise InputError(
                    "the server is not SGLang, which alone scores given tokens",
                    where=url,
                    remedy="serve with --engine sglang, or leave out --server",
                )
            self._require_model(model)
        except BaseException:
            self.client.close()
            raise

    def __enter__(self) -> SglangEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()

    def describe(self) -> dict[str, Any]:
        return {"name": "sglang", **self.settings}

    def score(self, items: Sequence[Item], *, progress: Progress = SILENT) -> list[list[float]]:
        total = sum(len(item.prompt) + len(item.continuation) for item in items)
        scores = []
        with progress.task("score", total, "tokens") as task:
            for item in items:
                task.note(item.id)
                scores.append(self._score(item))
                task.advance(len(item.prompt) + len(item.continuation))
        return scores

    def score_ranked(self, item: Item, top: int) -> list[tuple[float, int | None]]:
        """Log-probability of each continuation token and its rank, from 1 on; None beyond the first `top`."""
        return [
            (value, next((i for i, likely in enumerate(tops, 1) if likely == token), None))
            for token, value, tops in self._entries(item, top)
        ]

    def _score(self, item: Item) -> list[float]:
        return [value for _, value, _ in self._entries(item, 0)]

    def _entries(self, item: Item, top: int) -> list[tuple[int, float, list[int]]]:
        """(token, its log-probability, the `top` likeliest tokens) of the continuation."""
        ids = [*item.prompt, *item.continuation]
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0},
            "return_logprob": True,
            # Logits of the prompt are not wanted: for each token they are as wide as the vocabulary.
            "logprob_start_len": len(item.prompt) - 1,
            **({"top_logprobs_num": top} if top else {}),
        }
        where = self.client.url + GENERATE
        document = self.client.post(GENERATE, body)
        last = slice(-len(item.continuation), None)
        try:
            meta = document["meta_info"]
            entries = meta["input_token_logprobs"][last]
            tops = meta["input_top_logprobs"][last] if top else [[]] * len(entries)
            found = [
                (int(token), float("nan") if value is None else float(value), [int(t[1]) for t in likely])
                for (value, token, *_), likely in zip(entries, tops, strict=True)
            ]
        except (KeyError, TypeError, IndexError, ValueError):
            raise ServerError("the answer holds no log-probabilities of the prompt", where=where) from None
        if [token for token, _, _ in found] != list(item.continuation):
            raise ServerError(f"scored other tokens than those of prompt {item.id}", where=where)
        return found

    @contextmanager
    def damaged(self) -> Iterator[str | None]:
        """The weights of a server are out of reach."""
        yield None

    def record_states(self, item: Item) -> list[torch.Tensor]:
        del item
        return []

    def layer_errors(self, item: Item, states: Sequence[torch.Tensor]) -> list[float]:
        del item, states
        return []

    def _require_model(self, model: Path) -> None:
        for path in _MODEL_INFO:
            try:
                served = self.client.get(path).get("model_path")
            except ServerError:
                continue
            # A path that is not on this machine belongs to a server elsewhere, and tells nothing.
            if (
                isinstance(served, str)
                and Path(served).exists()
                and Path(served).resolve() != model.resolve()
            ):
                raise InputError(
                    f"serves {served}, not {model}", where=self.client.url, remedy="give the model it serves"
                )
            return
