"""What SGLang's weight loader gets: every tensor but the expert rows and the n-gram table.

Both have loaders of their own. Reading a model's experts through SGLang's iterator would pass tens of gigabytes
through the page cache for nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from q38.checkpoint.index import Checkpoint
from q38.sglang_ext.clock import at
from q38.sglang_ext.hooks import Hook, exit_on_refusal
from q38.sglang_ext.options import ExtensionOptions, resolve
from q38.sglang_ext.selection import for_sglang
from q38.sglang_ext.table_rows import TableRows
from q38.sglang_ext.targets import LOADER

logger = logging.getLogger(__name__)


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
    options, device = resolve(model_config.model_path), next(model.parameters()).device
    rows = _Rows(checkpoint, options, device)
    if options.device_rows is not None:  # else they take what the other tensors leave
        rows.start()
    for info in checkpoint.match(lambda name: for_sglang(name, table_on_disk=on_disk)):
        yield info.name, checkpoint.read(info.name)
    logger.info("q38 rows: %s", at("the other tensors are loaded"))
    rows.finish()


class _Rows:
    """The expert rows, read by threads of their own while SGLang's loader is busy with the other tensors."""

    def __init__(self, checkpoint: Checkpoint, options: ExtensionOptions, device: torch.device) -> None:
        self._arguments = (checkpoint, options, device)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._open, name="q38-rows", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    def finish(self) -> None:
        """Wait for the rows. A refusal ends the process, as everywhere in the extension."""
        if self._thread.ident is None:
            self._open()
        else:
            self._thread.join()
        with exit_on_refusal():
            if self._error is not None:
                raise self._error

    def _open(self) -> None:
        from q38.sglang_ext.residency import open_rows

        try:
            open_rows(*self._arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._error = error


def _has_rows(model: Any) -> bool:
    from q38.sglang_ext.experts import RowExpertsMethod

    return any(isinstance(getattr(m, "quant_method", None), RowExpertsMethod) for m in model.modules())
