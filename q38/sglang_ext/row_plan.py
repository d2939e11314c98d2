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
from q38.sglang_ext.options import ExtensionOptions

_TIE = 1e-6
KEEP = GIB  # host memory that stays available beside the pinned pool
# Bytes a row, of traffic.py: selections and reads, of decode, prompt and staged prompt steps.
_READINGS = 3 * 2 * 4


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
    scratch = heat.size * _READINGS
    pool = plan_pool(
        layout.row_bytes,
        resident,
        fewest=options.fewest_device_rows,
        spare=options.spare,
        scratch=scratch,
    )
    return RowPlan(heat, resident, scratch, pool)


def _heat(options: ExtensionOptions, layers: int, experts: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[layers, experts]: how often each row is expected to be read. Without a profile all alike, but for ties."""
    if options.profile is not None:
        return read_heat(Path(options.profile), layers, experts)
    # By number and not by layer: every layer then has as many in device memory, and reads both memories at a time.
    return np.tile(np.linspace(1, 1 - _TIE, experts), (layers, 1))


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
