"""Full-vocabulary log-probabilities of runs, chunk by chunk.

Log-probabilities over a large vocabulary do not fit in memory for many tokens, final hidden states
do: a run keeps those and the output head, and the projection to the vocabulary is made in chunks
when runs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

LOGIT_BYTES = 128 * 2**20  # float64 logits in hand at a time, per run


@dataclass(frozen=True)
class Run:
    """What one model made of the sequences.

    hidden: [sequences, tokens, hidden] final hidden states in the model's dtype.
    head: output head, [..., hidden] -> [..., vocabulary] logits.
    """

    hidden: torch.Tensor
    head: Callable[[torch.Tensor], torch.Tensor]


def text_model(model: Any) -> Any:
    """The module that owns the transformer blocks, in the multimodal and in the text-only class."""
    inner = model.model
    return getattr(inner, "language_model", inner)


def log_probabilities(
    runs: Sequence[Run], *, drop_last: bool = True
) -> Iterator[tuple[slice, tuple[torch.Tensor, ...]]]:
    """Log-probabilities of several runs over the same positions.

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
