"""What SGLang's weight loader gets: every tensor but the expert rows and the n-gram table.

Both have loaders of their own. Reading a model's experts through SGLang's iterator would pass tens of gigabytes
through the page cache for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from q38.checkpoint.index import Checkpoint
from q38.model.names import EXPERT, Group, classify
from q38.sglang_ext.hooks import Hook, exit_on_refusal
from q38.sglang_ext.options import resolve
from q38.sglang_ext.table_rows import TableRows
from q38.sglang_ext.targets import LOADER

_UNUSED = frozenset({Group.MTP, Group.MTP_EXPERTS})  # the predictor is not loaded


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(LOADER + "._get_all_weights", "around", get_all_weights)]


def get_all_weights(
    original: Callable[..., Iterator[tuple[str, torch.Tensor]]], self: Any, model_config: Any, model: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream (name, tensor) of a model whose experts lie in rows, then fill the rows; other models as ever."""
    if not _has_rows(model):
        yield from original(self, model_config, model)
        return
    checkpoint = Checkpoint.open(model_config.model_path)
    on_disk = any(isinstance(module, TableRows) for module in model.modules())
    for info in checkpoint.match(lambda name: for_sglang(name, table_on_disk=on_disk)):
        yield info.name, checkpoint.read(info.name)
    from q38.sglang_ext.residency import open_rows

    device = next(model.parameters()).device
    with exit_on_refusal():
        open_rows(checkpoint, resolve(model_config.model_path), device)


def for_sglang(name: str, *, table_on_disk: bool) -> bool:
    """Whether a tensor goes through SGLang's loader."""
    group = classify(name)
    if EXPERT.match(name) is not None or group in _UNUSED:
        return False
    return not (table_on_disk and group is Group.NGRAM)


def _has_rows(model: Any) -> bool:
    from q38.sglang_ext.experts import RowExpertsMethod

    return any(isinstance(getattr(m, "quant_method", None), RowExpertsMethod) for m in model.modules())
