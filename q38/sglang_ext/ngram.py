"""The n-gram table stays on disk; the rows of a step come to buffers that never move, so decode keeps its full graphs.

Row numbers depend on token ids alone. The host knows those of a prompt before the step and reads their rows then. The
ids of a decode step it knows only without overlap scheduling; with it the step itself fetches them (stream_rows.py).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from sglang.srt.models.qwen4_exp import Qwen4ExpNGramEmbedding
from torch import nn

from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.model.shape import ModelShape
from q38.ple.reader import PleTable
from q38.sglang_ext import residency
from q38.sglang_ext.hooks import Hook, exit_on_refusal
from q38.sglang_ext.options import resolve
from q38.sglang_ext.table_rows import TableRows, following_tokens, step_tokens
from q38.sglang_ext.targets import FORWARD_BATCH, QWEN4, SCHEDULER

logger = logging.getLogger(__name__)


class DiskNGramEmbedding(Qwen4ExpNGramEmbedding):  # type: ignore[misc]
    """Qwen4ExpNGramEmbedding whose table is never allocated; the original one where no table was split off.

    `q38 serve` always names a table; without one this is a model that SGLang serves with the plugin merely enabled.
    """

    def __init__(
        self,
        config: Any,
        embedding_dim: int,
        ple_layer_index: int = 0,
        quant_config: Any = None,
        prefix: str = "",
    ) -> None:
        with exit_on_refusal():
            found = _find_table()
        self.on_disk = found is not None
        if found is None:
            super().__init__(config, embedding_dim, ple_layer_index, quant_config, prefix)
            return
        # Read by the layer that owns this embedding, after it: no side stream, and no gather from host memory.
        config.ple_offload_embedding = False
        with torch.device("meta"):
            super().__init__(config, embedding_dim, ple_layer_index, quant_config, prefix)
        replaced: Any = self.ngram_embedding
        with exit_on_refusal():
            table, shape = _open_table(*found, (replaced.num_embeddings, replaced.embedding_dim))
            self.ngram_embedding: Any = TableRows(table, shape, ple_layer_index, in_stream=overlapped())
        logger.info(
            "q38: a decode step's n-gram rows are read %s it", "inside" if self.in_stream else "before"
        )
        # Made on meta with the table; SGLang's loader compares them with the checkpoint's.
        sizes, offsets, _ = self._build_head_vocab_and_offsets()
        self.layer_multipliers = self._build_layer_multipliers(self.ngram_size)
        self.ngram_heads_vocab_sizes = torch.tensor(sizes, dtype=torch.long)
        self.ngram_heads_offsets = torch.tensor(offsets, dtype=torch.long)

    def forward(self, batch: Any, forward_batch: Any) -> torch.Tensor:
        """bf16 [tokens, embed_dim] of the step's real tokens."""
        if not self.on_disk:
            own: torch.Tensor = super().forward(batch, forward_batch)
            return own
        decode = batch.mode.is_decode()
        if not (decode and self.in_stream):
            rows: torch.Tensor = self.ngram_embedding(batch.processed_tokens, decode=decode)
            return rows
        if not self.ngram_embedding.stream.started:  # the first layer of a model: nothing ran before it
            self.start(batch)
        fetched: torch.Tensor = self.ngram_embedding.stream.take()
        return fetched

    @property
    def in_stream(self) -> bool:
        """Whether a decode step fetches its rows itself."""
        return self.on_disk and self.ngram_embedding.stream is not None

    def start(self, batch: Any) -> None:
        """Begin to fetch the rows of a decode step."""
        self.ngram_embedding.stream.start(self.compute_ngram_ids(batch))

    def forward_idle(self, forward_batch: Any) -> None:
        """Nothing to look up on disk."""
        if not self.on_disk:
            super().forward_idle(forward_batch)


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(QWEN4 + ".Qwen4ExpNGramEmbedding", "replace", DiskNGramEmbedding),
        Hook(FORWARD_BATCH + ".init_new", "after", read_rows),
        Hook(QWEN4 + ".Qwen4ExpPLELayer.start_prefetch", "around", start_prefetch),
        Hook(SCHEDULER + ".process_batch_result", "around", process_batch_result),
    ]


def overlapped() -> bool:
    """Whether SGLang schedules a step before the tokens of the one before are known."""
    from sglang.srt.runtime_context import get_schedule

    return not get_schedule().disable_overlap_schedule


def start_prefetch(original: Callable[..., None], self: Any, batch: Any, forward_batch: Any) -> None:
    """SGLang calls it ahead of the layer before this one."""
    embedding = self.ple_embedding
    if batch is not None and batch.mode.is_decode() and getattr(embedding, "in_stream", False):
        embedding.start(batch)
    else:
        original(self, batch=batch, forward_batch=forward_batch)


def process_batch_result(original: Callable[..., None], self: Any, batch: Any, result: Any) -> None:
    """No token of a step leaves the server whose rows could not be read."""
    streams = [rows.stream for rows in _embeddings(self.tp_worker.model_runner.model) if rows.stream]
    if streams and (copied := getattr(result, "copy_done", None)) is not None:
        copied.synchronize()
    with exit_on_refusal():
        for stream in streams:
            stream.fetcher.check()
    original(self, batch, result)


def read_rows(result: Any, _cls: type, batch: Any, model_runner: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Read the rows that a batch needs, before its forward pass; not those that it fetches itself."""
    embeddings = _embeddings(model_runner.model)
    mode = batch.forward_mode
    if not embeddings or mode.is_idle():
        return result
    if not (mode.is_decode() or mode.is_extend()) or mode.is_target_verify():
        raise InputError(f"a step of kind {mode}", where="n-gram rows", remedy="serve without speculation")
    if embeddings[0].stream is not None:
        if mode.is_decode():
            return result
        if mode.is_mixed():
            raise InputError(
                "prompts and answers in one step",
                where="n-gram rows",
                remedy="serve without --enable-mixed-chunk, or with --no-overlap",
            )
    windows, new = step_tokens(batch, context=embeddings[0].context)
    if sum(new) != result.input_ids.shape[0]:
        raise InputError(
            f"{result.input_ids.shape[0]} tokens in a step whose requests account for {sum(new)}",
            where="n-gram rows",
            remedy="serve without beam search",
        )
    for embedding in embeddings:
        embedding.read(windows, new, decode=mode.is_decode())
    if mode.is_extend() and any((ahead := following_tokens(batch, context=embeddings[0].context))[1]):
        for embedding in embeddings:
            embedding.read_ahead(*ahead)
    return result


def _embeddings(model: nn.Module) -> list[TableRows]:
    found: list[TableRows] | None = getattr(model, "_q38_table_rows", None)
    if found is None:
        found = [module for module in model.modules() if isinstance(module, TableRows)]
        model._q38_table_rows = found  # type: ignore[assignment]
        if found and (stored := residency.loaded()) is not None:
            stored.others["ngram"] = found[0].counts
    return found


def _find_table() -> tuple[Path, Path] | None:
    """(model, directory of its split table), or None."""
    from sglang.srt.runtime_context import get_server_args

    model = Path(get_server_args().model_path)
    directory = resolve(str(model)).ple
    return None if directory is None else (model, Path(directory))


def _open_table(model: Path, directory: Path, wanted: tuple[int, int]) -> tuple[PleTable, ModelShape]:
    table = PleTable.open(directory)
    if (table.num_rows, table.dim) != wanted:
        raise InputError(
            f"n-gram table of {table.num_rows} rows x {table.dim}, the model wants {wanted[0]} x {wanted[1]}",
            where=table.origin,
            remedy="give the table that was split from this model",
        )
    return table, ModelShape.from_config(read_json(model / "config.json"))
