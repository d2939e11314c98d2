"""Changes to transformers' Qwen4-Exp that hold for this process only.

ngram_lookup   the n-gram table stays on disk: a lookup module without parameters takes nn.Embedding's place
without_vision the composite model is built without its vision tower
qsa_shortcut   short sequences skip the sparse-attention indexer, whose loop over queries dominates on CPU
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

from q38.base.errors import InputError
from q38.ple.reader import PleTable


class NgramLookup(nn.Module):
    """Rows of an n-gram table on disk, where transformers expects nn.Embedding.

    Parameter-free, so state_dict, device maps and quantizers pass it by.
    """

    def __init__(self, table: PleTable, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.table, self.dtype = table, dtype

    @property
    def weight(self) -> torch.Tensor:
        """Empty; transformers asks it for the device on which the ids are wanted."""
        return torch.empty(0)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [...] -> [..., dim] in `dtype`, on the device of the ids."""
        rows = self.table.rows(ids.reshape(-1))
        return rows.view(*ids.shape, self.table.dim).to(ids.device, self.dtype)


@contextmanager
def ngram_lookup(table: PleTable, *, dtype: torch.dtype = torch.bfloat16) -> Iterator[None]:
    """Models built inside take their n-gram rows from `table`, and never allocate the table.

    Raises (while the model is built):
        InputError: rows or dim of the table are not those of the model.
    """
    original = modeling.Qwen4ExpTextNGramEmbedding.__init__

    @wraps(original)
    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            original(self, *args, **kwargs)
        wanted = (self.ngram_embedding.num_embeddings, self.ngram_embedding.embedding_dim)
        if wanted != (table.num_rows, table.dim):
            raise InputError(
                f"n-gram table of {table.num_rows} rows x {table.dim}, the model wants {wanted[0]} x {wanted[1]}",
                where=table.origin,
                remedy="give the table that was split from this model",
            )
        self.ngram_embedding = NgramLookup(table, dtype)
        # The constants were made on meta with the table; make them again on the caller's device.
        multipliers = modeling._build_layer_multipliers(
            self.unigram_vocab_size, self.ngram_size, self.ple_layer_index, self.seed
        )
        self.layer_multipliers = nn.Buffer(multipliers)
        self.ngram_heads_vocab_sizes = nn.Buffer(torch.tensor(self.head_vocab_sizes))
        self.ngram_heads_offsets = nn.Buffer(torch.tensor(self.head_offsets))

    with _replaced(modeling.Qwen4ExpTextNGramEmbedding, "__init__", build):
        yield


@contextmanager
def without_vision() -> Iterator[None]:
    """Composite models built inside have `model.visual = None`; text input works as before."""
    original = modeling.Qwen4ExpModel.__init__

    @wraps(original)
    def build(self: Any, config: Any) -> None:
        original(self, config)
        self.visual = None

    with _replaced(modeling.Qwen4ExpModel, "__init__", build):
        yield


@contextmanager
def qsa_shortcut() -> Iterator[None]:
    """Inside, sparse attention over at most budget + ratio - 1 tokens takes the exact shortcut."""
    with _replaced(modeling.Qwen4ExpTextQSAIndexer, "forward", _indexer_forward):
        yield


def install_qsa_shortcut() -> None:
    """The same for the rest of the process (a server). Longer sequences run transformers' own code."""
    modeling.Qwen4ExpTextQSAIndexer.forward = _indexer_forward


_full_forward = modeling.Qwen4ExpTextQSAIndexer.forward


def _indexer_forward(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: torch.Tensor,
    past_key_values: Any = None,
) -> torch.Tensor:
    """Up to budget + ratio - 1 visible tokens make at most budget / ratio whole blocks, so the top-k keeps
    all of them and the incomplete block is always kept: the selection is the causal and padding mask.

    attention_mask: bool or float [batch, 1, queries, keys]; returns the same.
    """
    if attention_mask.shape[-1] > self.token_budget + self.compress_ratio - 1:
        full: torch.Tensor = _full_forward(
            self, hidden_states, position_embeddings, attention_mask, past_key_values
        )
        return full
    if past_key_values is not None:  # later, longer steps need these keys
        split = self.index_n_heads * self.index_head_dim
        past_key_values.update_indexer(self.index_qk_proj(hidden_states)[..., split:], self.layer_idx)
    if attention_mask.dtype == torch.bool:
        return attention_mask
    lowest = torch.finfo(attention_mask.dtype).min
    return torch.where(attention_mask == 0, attention_mask.new_zeros(()), lowest)


_patching = threading.RLock()


@contextmanager
def _replaced(owner: type, name: str, value: Callable[..., Any]) -> Iterator[None]:
    with _patching:
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)
