"""Prompt steps take their host rows from a ring in device memory, which the copy engine fills ahead of them.

Only where a step is long enough to need most host rows anyway; else they are read in place. See q38.residency.staging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from q38.kernels import moe_prefill_cuda
from q38.kernels.moe_prefill_cuda import Parts
from q38.residency.staging import PIECES, Ring, fewest_tokens

if TYPE_CHECKING:
    from q38.kernels.rows import RowLayout
    from q38.residency.cache import ExpertCache


@dataclass(frozen=True)
class StagedLayer:
    """What the prefill kernel is given for one layer.

    table: int64 [experts], addresses by position. parts: the experts' order, and when their rows are there.
    host_rows: rows that are copied for it.
    """

    table: torch.Tensor
    parts: Parts
    host_rows: int


class PrefillStaging:
    """Staging of one model's rows.

    Args:
        rows: row slots of the ring, in so many pieces.
        top_k: experts that a token chooses.

    Raises:
        CudaError: no memory for the ring.
    """

    def __init__(
        self, cache: ExpertCache, rows: int, top_k: int, device: torch.device, *, pieces: int = PIECES
    ) -> None:
        self.cache, self.device, self._top_k = cache, device, top_k
        self.ring = Ring(cache.store.driver, cache.store.row_bytes, rows, pieces=pieces)
        shape = (cache.layers, cache.experts)
        self._positions = torch.zeros(shape, dtype=torch.int32, device=device)
        self._addresses = torch.zeros(shape, dtype=torch.int64, device=device)
        self._places = np.empty(0, np.int64)  # where the rows lay when the pass was planned
        self._resident: list[int] = []
        self._fewest = 0

    def begin(self, tokens: int) -> None:
        """A step of so many prompt tokens comes next: let the copies for its first layers start before it does."""
        if tokens < self._fewest:  # by the last placement: a step that is read in place need not plan anew
            return
        self._follow_rows()
        if tokens >= self._fewest:
            self.ring.begin()

    def layer(self, layer: int, tokens: int) -> StagedLayer | None:
        """The layer's rows for so many tokens, on the current stream; None where they are better read in place."""
        if torch.cuda.is_current_stream_capturing():  # a replay has no host that starts the copies
            return None
        if tokens < self._fewest:
            return None
        if not self.ring.expects(layer):
            self._follow_rows()
            if tokens < self._fewest:
                return None
        if not self.ring.expects(layer):  # nobody said begin: SGLang's own runs at the start
            self.ring.begin(layer)
        stream = torch.cuda.current_stream(self.device).cuda_stream
        parts = Parts(self._positions[layer], self.ring.parts(layer, stream))
        return StagedLayer(self._addresses[layer], parts, self.cache.experts - self._resident[layer])

    def _follow_rows(self) -> None:
        """Plan anew when rows have moved."""
        store, shape = self.cache.store, (self.cache.layers, self.cache.experts)
        if np.array_equal(self._places, store.place):
            return
        self._places = store.place.copy()
        addresses = store.addresses(self._places).reshape(shape)
        plan = self.ring.follow(self._places.reshape(shape), addresses)
        self._resident = plan.resident
        self._fewest = fewest_tokens(self.cache.heat.reshape(shape), self.cache.resident, self._top_k)
        # In the order of the stream that reads them: kernels enqueued before still need the old ones.
        with torch.cuda.stream(_stream(store.stream, self.device)):
            self._positions.copy_(torch.from_numpy(plan.positions))
            self._addresses.copy_(torch.from_numpy(plan.addresses))


def open_staging(
    cache: ExpertCache, layout: RowLayout, rows: int, top_k: int, device: torch.device
) -> PrefillStaging | None:
    """Staging through `rows` row slots; None where none are given, or the kernels that take rows in parts cannot run.

    Raises:
        as PrefillStaging.
    """
    if not rows or moe_prefill_cuda.missing(layout, device) is not None:
        return None
    return PrefillStaging(cache, rows, top_k, device)


def _stream(handle: int, device: torch.device) -> torch.cuda.Stream:
    if not handle:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle)  # type: ignore[no-untyped-call]
