"""Parameters and bytes by parameter group, as recipes name the groups."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from q38.checkpoint.header import TensorInfo
from q38.inspection.opened import Opened
from q38.model.names import Group, classify

_OVERHEAD = (".qzeros", ".scales", ".weight_scale_inv", ".weight_scale")  # describe parameters, are none


@dataclass
class GroupCount:
    """Sums over one group. `dtypes`: stored dtype -> bytes."""

    group: Group
    tensors: int = 0
    parameters: int = 0
    nbytes: int = 0
    dtypes: Counter[str] = field(default_factory=Counter)
    example: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {
            "group": self.group.value,
            "tensors": self.tensors,
            "parameters": self.parameters,
            "bytes": self.nbytes,
            "dtypes": dict(self.dtypes.most_common()),
            "example": self.example,
        }


def count_groups(opened: Opened) -> list[GroupCount]:
    """One count per group that occurs, the largest first."""
    counts: dict[Group, GroupCount] = {}
    for name, info in opened.tensors.items():
        group = classify(name)
        count = counts.get(group)
        if count is None:
            count = counts[group] = GroupCount(group, example=name)
        count.tensors += 1
        count.parameters += _parameters(opened, name, info)
        count.nbytes += info.nbytes
        count.dtypes[info.dtype] += info.nbytes
    return sorted(counts.values(), key=lambda c: -c.nbytes)


def _parameters(opened: Opened, name: str, info: TensorInfo) -> int:
    if name.endswith(".qweight"):
        width = opened.widths[name.removesuffix(".qweight")]
        return math.prod(info.shape) * 32 // width if width else 0
    return 0 if name.endswith(_OVERHEAD) else info.numel
