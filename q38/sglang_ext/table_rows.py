"""The n-gram rows of one step: which tokens decide them, and the buffers that they are read into."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from q38.base.errors import InputError
from q38.model.ngram import row_ids
from q38.model.shape import ModelShape
from q38.ple.reader import PleTable

DECODE_TOKENS = 64  # tokens of one decode step that the fixed buffer holds


class TableRows(nn.Module):
    """Takes the place of the embedding over the whole table; has no parameters.

    Attributes:
        context: tokens before a token that its rows depend on.
        decode: bf16 [DECODE_TOKENS, embed_dim] at an address that captured graphs keep.
        prefill: bf16 [tokens, embed_dim], grown as chunks need it.
    """

    decode: torch.Tensor
    prefill: torch.Tensor

    def __init__(self, table: PleTable, shape: ModelShape, index: int) -> None:
        super().__init__()
        assert shape.ngram is not None
        self.table, self.shape, self.index = table, shape, index
        self.embed_dim, self.context = shape.ngram.embed_dim, shape.ngram.ngram_size - 1
        for name, tokens in (("decode", DECODE_TOKENS), ("prefill", 0)):
            self.register_buffer(
                name, torch.zeros(tokens, self.embed_dim, dtype=torch.bfloat16), persistent=False
            )

    def read(self, windows: list[NDArray[np.int64]], new: list[int], *, decode: bool) -> None:
        """Read the rows of a step and put them on the device, in the order of its tokens.

        Args:
            windows: token ids of each request: its `new` last ones are in the step, those before are context.
            new: tokens of each request in the step.
        """
        ids = [row_ids(window, self.shape, self.index)[-n:] for window, n in zip(windows, new, strict=True)]
        flat = np.concatenate(ids)  # [tokens, heads]
        rows = self.table.rows(torch.from_numpy(flat.reshape(-1))).view(len(flat), self.embed_dim)
        self._room(len(flat), decode=decode)[: len(flat)].copy_(rows, non_blocking=True)

    def forward(self, tokens: int, *, decode: bool) -> torch.Tensor:
        """bf16 [tokens, embed_dim]: what was read for this step."""
        return self._room(tokens, decode=decode)[:tokens]

    def _room(self, tokens: int, *, decode: bool) -> torch.Tensor:
        if not decode:
            if len(self.prefill) < tokens:
                self.prefill = self.prefill.new_zeros(tokens, self.embed_dim)
            return self.prefill
        if tokens > len(self.decode):
            raise InputError(
                f"{tokens} tokens decoded at once, the n-gram buffer holds {len(self.decode)}",
                where="n-gram rows",
                remedy=f"pass --max-running-requests {len(self.decode)} or fewer",
            )
        return self.decode


def step_tokens(batch: Any, *, context: int) -> tuple[list[NDArray[np.int64]], list[int]]:
    """Per request: its tokens in this step with up to `context` tokens before them, and how many are new."""
    windows, new = [], []
    for i, request in enumerate(batch.reqs):
        if batch.forward_mode.is_decode():
            count = 1
            tokens = list(request.output_ids[-context - 1 :])
            if len(tokens) <= context:
                tokens = list(request.origin_input_ids[-(context + 1 - len(tokens)) :]) + tokens
        else:
            start, count = batch.prefix_lens[i], batch.extend_lens[i]
            tokens = request.full_untruncated_fill_ids[max(start - context, 0) : start + count]
        windows.append(np.array(tokens, dtype=np.int64))
        new.append(count)
    return windows, new
