"""Models as measurements load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from q38.checkpoint.index import Checkpoint
from q38.hf.load import load_model, weight_bytes
from q38.hf.unpack import unpacked_bytes
from q38.measure.host_memory import require_loadable
from q38.model.names import Group, classify

UNPACKED_BYTES = 2**30  # packed matrices are unpacked once, not at every call, while they fit in this


def load_for_measuring(path: Path, *, ple: Path | None = None, dtype: torch.dtype = torch.bfloat16) -> Any:
    """`q38.hf.load.load_model`, with the packed matrices of a small model unpacked.

    Raises:
        ResourceError: the weights alone take more memory than there is; nothing was loaded.
    """
    checkpoint = Checkpoint.open(path)
    unpack = unpacked_bytes(checkpoint, dtype.itemsize) <= UNPACKED_BYTES
    require_loadable(
        weight_bytes(checkpoint, dtype, unpack=unpack), where=path, dtype=str(dtype).removeprefix("torch.")
    )
    return load_model(path, ple=ple, dtype=dtype, unpack=unpack)


def holds_table(path: Path) -> bool:
    """Whether the checkpoint holds its n-gram table itself."""
    return any(classify(name) is Group.NGRAM for name in Checkpoint.open(path).tensors)
