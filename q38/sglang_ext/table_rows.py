"""The n-gram rows of one step: which tokens decide them, and the buffers that they are read into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from q38.base.errors import InputError
from q38.model.ngram import last_row_ids, row_ids
from q38.model.shape import ModelShape
from q38.ple.cast import dequantize
from q38.ple.fetch import RowFetcher
from q38.ple.reader import PleTable
from q38.ple.row_source import RowSource
from q38.sglang_ext.options import DECODE_TOKENS
from q38.sglang_ext.stream_rows import StreamRows

Tokens = Sequence[int]


class TableRows(nn.Module):
    """Takes the place of the embedding over the whole table; has no parameters.

    Args:
        in_stream: rows of decode steps are fetched inside them, and not read before.

    Attributes:
        context: tokens before a token that its rows depend on.
        stream: what fetches them; None where they are read before the step.
        decode: bf16 [DECODE_TOKENS, embed_dim] at an address that captured graphs keep.
        prefill: bf16 [tokens, embed_dim], grown as chunks need it.
    """

    decode: torch.Tensor
    prefill: torch.Tensor

    def __init__(self, table: PleTable, shape: ModelShape, index: int, *, in_stream: bool = False) -> None:
        super().__init__()
        assert shape.ngram is not None
        self.table, self.shape, self.index = table, shape, index
        self.source = RowSource(table)
        self.embed_dim, self.context = shape.ngram.embed_dim, shape.ngram.ngram_size - 1
        for name, tokens in (("decode", DECODE_TOKENS), ("prefill", 0)):
            self.register_buffer(
                name, torch.zeros(tokens, self.embed_dim, dtype=torch.bfloat16), persistent=False
            )
        self.stream: StreamRows | None = None
        if in_stream:
            fetcher = RowFetcher(table, self.source.prompt)
            self.stream = StreamRows(fetcher, shape.ngram.heads, DECODE_TOKENS, self.decode.device)

    def read(self, windows: Sequence[Tokens], new: list[int], *, decode: bool) -> None:
        """Read the rows of a step and put them on the device, in the order of its tokens.

        Args:
            windows: token ids of each request: its `new` last ones are in the step, those before are context.
            new: tokens of each request in the step.
        """
        tokens = sum(new)
        rows = self._few(windows) if decode else self._many(windows, new)
        self._room(tokens, decode=decode)[:tokens].copy_(rows.view(tokens, self.embed_dim), non_blocking=True)

    def counts(self) -> dict[str, Any]:
        """Rows of all steps since the start: row_source.RowCounts."""
        found = self.source.counts.to_dict()
        inside = {} if self.stream is None else self.stream.fetcher.counts()
        return {name: value + inside.get(name, 0) for name, value in found.items()}

    def read_ahead(self, windows: Sequence[Tokens], new: list[int]) -> None:
        """Start reading rows that the next prompt step will take; see `read`."""
        self.source.read_ahead(self._ids(windows, new))

    def _ids(self, windows: Sequence[Tokens], new: list[int]) -> NDArray[np.int64]:
        """int64 [tokens * heads]."""
        texts = (np.array(window, dtype=np.int64) for window in windows)
        ids = [row_ids(text, self.shape, self.index)[-n:] for text, n in zip(texts, new, strict=True)]
        return np.concatenate(ids).reshape(-1)

    def _few(self, windows: Sequence[Tokens]) -> torch.Tensor:
        """bf16 [tokens * heads, dim] of the last token of each window."""
        ids = [i for window in windows for i in last_row_ids(window, self.shape, self.index)]
        return self.table.values(self.source.few(ids), ids)

    def _many(self, windows: Sequence[Tokens], new: list[int]) -> torch.Tensor:
        """The same for many tokens: fp8 rows travel as codes and become bf16 on the device."""
        ids = self._ids(windows, new)
        stored, place = self.source.rows(ids)
        scale = self.table.scale
        if scale is None:
            unique = np.empty(len(stored), np.int64)
            unique[place] = ids
            return self.table.values(stored, unique.tolist())[torch.from_numpy(place)]
        codes = torch.from_numpy(stored[place]).view(torch.float8_e4m3fn)
        return dequantize(codes.to(self.prefill.device), scale)

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


def step_tokens(batch: Any, *, context: int) -> tuple[list[Tokens], list[int]]:
    """Per request: its tokens in this step with up to `context` tokens before them, and how many are new."""
    windows: list[Tokens] = []
    new: list[int] = []
    for i, request in enumerate(batch.reqs):
        if batch.forward_mode.is_decode():
            count = 1
            tokens = list(request.output_ids[-context - 1 :])
            if len(tokens) <= context:
                tokens = list(request.origin_input_ids[-(context + 1 - len(tokens)) :]) + tokens
        else:
            start, count = batch.prefix_lens[i], batch.extend_lens[i]
            tokens = request.full_untruncated_fill_ids[max(start - context, 0) : start + count]
        windows.append(tokens)
        new.append(count)
    return windows, new


def following_tokens(batch: Any, *, context: int) -> tuple[list[Tokens], list[int]]:
    """The same for the step after a prompt step: as many tokens again of each request that has more of its prompt."""
    windows: list[Tokens] = []
    new: list[int] = []
    for i, request in enumerate(batch.reqs):
        start = batch.prefix_lens[i] + batch.extend_lens[i]
        first = max(start - context, 0)
        tokens = request.full_untruncated_fill_ids[first : start + batch.extend_lens[i]]
        if len(tokens) > start - first:
            windows.append(tokens)
            new.append(len(tokens) - (start - first))
    return windows, new
