"""Bytes, parameters and widths per parameter group, read from the headers of a checkpoint."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from q38.checkpoint.index import Checkpoint
from q38.model.names import Group, classify

_WORD = 32  # bits of a packed word


def group_sizes(directory: Path) -> list[dict[str, Any]]:
    """One row per group, largest first.

    Each row: "group", "tensors", "bytes", "parameters" (weights, not packed words) and "bits", the
    widths of its tensors, most frequent first. The width of a packed matrix is that of its zero points,
    qzeros int32 [groups, N * bits / 32], beside qweight int32 [K * bits / 32, N].
    """
    checkpoint = Checkpoint.open(directory)
    rows: dict[Group, dict[str, Any]] = {}
    for info in checkpoint.tensors.values():
        group = classify(info.name)
        row = rows.setdefault(group, {"tensors": 0, "bytes": 0, "parameters": 0, "bits": Counter()})
        row["tensors"] += 1
        row["bytes"] += info.nbytes
        if info.name.endswith((".qzeros", ".scales", ".weight_scale", ".weight_scale_inv")):
            continue
        bits = info.nbytes * 8 // max(info.numel, 1)
        parameters = info.numel
        if info.name.endswith(".qweight"):
            zeros = checkpoint.info(info.name.removesuffix("qweight") + "qzeros")
            bits = zeros.shape[1] * _WORD // info.shape[1]
            parameters = info.numel * _WORD // bits
        row["parameters"] += parameters
        row["bits"][bits] += 1
    ordered = sorted(rows.items(), key=lambda item: -item[1]["bytes"])
    return [
        {"group": str(group), **row, "bits": [bits for bits, _ in row["bits"].most_common()]}
        for group, row in ordered
    ]
