"""Which rows of a model lie where when a server starts: the same for the process that serves and for one that reads ahead of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError
from q38.base.units import GIB
from q38.model.shape import ModelShape
from q38.residency import placement, profile
from q38.residency.cache import Heat, PoolPlan, plan_pool
from q38.residency.heat import hottest_overall
from q38.residency.layout import ExpertLayout
from q38.residency.store import Mask
from q38.residency.table import ENTRY
from q38.sglang_ext.options import ExtensionOptions

KEEP = GIB  # host memory that stays available beside the pinned pool


@dataclass(frozen=True)
class RowPlan:
    """Rows at the start.

    heat: [layers, experts], how often each row is expected to be read.
    resident: bool [layers, experts], rows that start in device memory.
    scratch: pinned bytes for counters, beside what the cache needs itself.
    """

    heat: Heat
    resident: Mask
    scratch: int
    pool: PoolPlan


def plan_rows(
    shape: ModelShape, layout: ExpertLayout, options: ExtensionOptions, device_rows: int
) -> RowPlan:
    """Decide by the options alone, so that every process comes to the same.

    Raises:
        InputError: the profile is of another model.
    """
    heat = _heat(options, shape.num_layers, shape.num_experts)
    resident = hottest_overall(heat, min(device_rows, heat.size))
    scratch = heat.size * ENTRY
    pool = plan_pool(
        layout.row_bytes,
        resident,
        fewest=options.fewest_device_rows,
        spare=options.spare,
        scratch=scratch,
    )
    return RowPlan(heat, resident, scratch, pool)


def _heat(options: ExtensionOptions, layers: int, experts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[layers, experts]: how often each row is expected to be read."""
    return (
        np.ones((layers, experts))
        if options.profile is None
        else read_heat(Path(options.profile), layers, experts)
    )


def read_heat(file: Path, layers: int, experts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The heat of a routing profile, [layers, experts].

    Raises:
        InputError: it is of another model.
    """
    found = placement.heat(profile.load(file))
    if found.shape != (layers, experts):
        raise InputError(
            f"a profile of {found.shape[0]} x {found.shape[1]} experts, the model has {layers} x {experts}",
            where=file,
            remedy="build it for this model: q38 build-placement",
        )
    return found
