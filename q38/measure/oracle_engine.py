"""Engines that score fixed continuations. One is here, transformers in this process; oracle_sglang has the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from q38.base.progress import SILENT, Progress
from q38.checkpoint.job import package_versions
from q38.measure.forward import text_model
from q38.measure.oracle_layers import layer_errors, record_states
from q38.measure.oracle_prompts import Item

CHUNK = 1024  # tokens
Dtype = Literal["float32", "bfloat16"]


class Engine(Protocol):
    """Anything that can force a continuation and tell its log-probabilities."""

    def describe(self) -> dict[str, Any]:
        """Name, versions and flags, for the reference file."""

    def score(self, items: Sequence[Item], *, progress: Progress = SILENT) -> list[list[float]]:
        """Per item: natural-log probability of each continuation token, given all tokens before it."""

    def damaged(self) -> AbstractContextManager[str | None]:
        """Inside, one weight matrix is wrong; yields which. None where the engine cannot be damaged."""

    @property
    def takes_states(self) -> bool:
        """Whether single blocks can be fed; the two methods below give nothing otherwise."""

    def record_states(self, item: Item) -> list[torch.Tensor]:
        """What enters each block and what leaves the last, on the item's prompt."""

    def layer_errors(self, item: Item, states: Sequence[torch.Tensor]) -> list[float]:
        """Relative error of each block's output on recorded inputs."""


class TransformersEngine:
    """The model in this process, on the CPU. Float32 by default: the arithmetic that other engines approximate.

    chunk: longer inputs are read in pieces of so many tokens, each of which reads the KV cache, the recurrent
    states and the n-gram context that those before it left.
    """

    takes_states = True

    def __init__(
        self, path: Path, *, ple: Path | None = None, dtype: Dtype = "float32", chunk: int = CHUNK
    ) -> None:
        from q38.measure.loading import load_for_measuring

        self.dtype: Dtype = dtype
        self.chunk = chunk
        self.model = load_for_measuring(path, ple=ple, dtype=getattr(torch, dtype))

    def describe(self) -> dict[str, Any]:
        experts = self.model.get_experts_implementation()
        return {
            "name": "transformers",
            "dtype": self.dtype,
            "chunk": self.chunk,
            "experts": experts.get("text_config") or experts.get(""),
            "threads": torch.get_num_threads(),
            "versions": package_versions(),
        }

    def score(self, items: Sequence[Item], *, progress: Progress = SILENT) -> list[list[float]]:
        from q38.hf.hooks import qsa_shortcut

        total = sum(len(item.prompt) + len(item.continuation) for item in items)
        scores = []
        with qsa_shortcut(), torch.inference_mode(), progress.task("score", total, "tokens") as task:
            for item in items:
                scores.append(self._score(item))
                task.advance(len(item.prompt) + len(item.continuation))
        return scores

    def _score(self, item: Item) -> list[float]:
        ids = torch.tensor([item.prompt + item.continuation])  # [1, P + C]
        hidden = self._hidden(ids)  # [P + C, H]
        before = hidden[len(item.prompt) - 1 : -1]  # what predicts each continuation token
        logits = self.model.get_output_embeddings()(before).double()  # [C, V]
        wanted = torch.tensor(item.continuation)[:, None]
        values: list[float] = torch.log_softmax(logits, dim=-1).gather(1, wanted)[:, 0].tolist()
        return values

    def _hidden(self, ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] <= self.chunk:
            whole: torch.Tensor = self.model.model(input_ids=ids, use_cache=False)[0][0]
            return whole
        cache, pieces = None, []
        for piece in torch.split(ids, self.chunk, dim=1):
            out = self.model.model(input_ids=piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            pieces.append(out[0][0])
        return torch.cat(pieces)

    def record_states(self, item: Item) -> list[torch.Tensor]:
        return record_states(self.model, item.prompt)

    def layer_errors(self, item: Item, states: Sequence[torch.Tensor]) -> list[float]:
        return layer_errors(self.model, item.prompt, states)

    @contextmanager
    def damaged(self) -> Iterator[str | None]:
        """The output projection of the middle block's attention with its sign flipped."""
        layers = text_model(self.model).layers
        index = len(layers) // 2
        layer = layers[index]
        linear = hasattr(layer, "linear_attn")
        module = layer.linear_attn.out_proj if linear else layer.self_attn.o_proj
        weight = module.scales if hasattr(module, "scales") else module.weight  # packed, or not
        weight.data.neg_()
        try:
            yield f"layers.{index}.{'linear_attn.out_proj' if linear else 'self_attn.o_proj'}, sign flipped"
        finally:
            weight.data.neg_()
