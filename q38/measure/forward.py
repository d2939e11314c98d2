"""Run a model over token sequences and keep what a comparison needs.

Log-probabilities over a large vocabulary do not fit in memory for many tokens, final hidden states
do: a run keeps those and the output head, and the projection to the vocabulary is made again, in
chunks, when two runs are compared. So two models never need to be loaded at the same time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from q38.base.progress import SILENT, Progress

BLOCK_BYTES = 256 * 2**20  # block outputs kept per run; sequences beyond this budget are not traced
LOGIT_BYTES = 128 * 2**20  # float64 logits in hand at a time


@dataclass(frozen=True)
class Run:
    """What one model made of the sequences.

    hidden: [sequences, tokens, hidden] final hidden states in the model's dtype.
    head: output head, [..., hidden] -> [..., vocabulary] logits.
    blocks: [layers, traced sequences, tokens, width] output of each block, in the model's dtype.
    """

    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]
    blocks: torch.Tensor


def run_model(
    model: Any, ids: torch.Tensor, *, batch_size: int = 4, label: str = "forward", progress: Progress = SILENT
) -> Run:
    """Forward all sequences, without a cache.

    Args:
        model: a transformers Qwen4-Exp model in eval mode.
        ids: int64 [sequences, tokens].
    """
    text = text_model(model)
    traced = min(len(ids), max(1, BLOCK_BYTES // _block_bytes(text, ids.shape[1])))
    hidden: list[torch.Tensor] = []
    blocks: list[list[torch.Tensor]] = [[] for _ in text.layers]
    with torch.inference_mode(), progress.task(label, ids.numel(), "tokens") as task:
        for start in range(0, len(ids), batch_size):
            batch = ids[start : start + batch_size]
            keep = max(0, min(traced - start, len(batch)))
            with _block_outputs(text, blocks, keep):
                hidden.append(model.model(input_ids=batch, use_cache=False)[0])  # [B, T, H]
            task.advance(batch.numel())
    outputs = torch.stack([torch.cat(layer) for layer in blocks])  # [L, traced, T, W]
    return Run(torch.cat(hidden), model.get_output_embeddings(), outputs)


def text_model(model: Any) -> Any:
    """The module that owns the transformer blocks, in the multimodal and in the text-only class."""
    inner = model.model
    return getattr(inner, "language_model", inner)


def log_probabilities(
    runs: tuple[Run, ...], *, drop_last: bool = True
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Full-vocabulary log-probabilities of several runs over the same positions, chunk by chunk.

    Args:
        drop_last: leave out the last position of each sequence, which has no next token.

    Yields:
        (positions, one float64 [positions, vocabulary] tensor per run); positions count through
        the sequences, row by row.
    """
    stop = -1 if drop_last else None
    states = [run.hidden[:, :stop].flatten(0, 1) for run in runs]  # [P, H] each
    with torch.inference_mode():
        vocabulary = runs[0].head(states[0][:1]).shape[-1]
        size = max(1, LOGIT_BYTES // (8 * vocabulary))
        for start in range(0, len(states[0]), size):
            piece = slice(start, min(start + size, len(states[0])))
            logits = (run.head(state[piece]).double() for run, state in zip(runs, states, strict=True))
            yield piece, tuple(torch.log_softmax(x, dim=-1) for x in logits)


@contextmanager
def other_experts(model: Any) -> Iterator[str]:
    """Compute the experts by another implementation of transformers inside the `with` block.

    Yields:
        what changed, for the report; "unchanged" where the experts are separate modules.
    """
    before = model.get_experts_implementation()
    used = before.get("text_config") or before.get("")
    other = "eager" if used != "eager" else "grouped_mm"
    model.set_experts_implementation(other)
    try:
        yield f"{used} -> {other}"
    finally:
        model.set_experts_implementation(before)


def _block_bytes(text: Any, tokens: int) -> int:
    config = text.config
    width = config.hc_count * config.hidden_size
    return int(len(text.layers) * tokens * width * text.embed_tokens.weight.element_size())


@contextmanager
def _block_outputs(text: Any, blocks: list[list[torch.Tensor]], keep: int) -> Iterator[None]:
    """Append the first `keep` sequences of every block's output to `blocks`."""

    def hook(kept: list[torch.Tensor]) -> Callable[..., None]:
        def store(_module: Any, _inputs: Any, output: Any) -> None:
            kept.append((output[0] if isinstance(output, tuple) else output)[:keep].clone())

        return store

    handles = []
    if keep:
        handles = [
            layer.register_forward_hook(hook(kept)) for layer, kept in zip(text.layers, blocks, strict=True)
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
