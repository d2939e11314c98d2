"""Which expert rows the model has read, and from where: hit rate and bytes over the link.

The counters are read either at once, waiting for the device (`collect`), or as they arrive (`request`, `arrived`).
A prompt step whose host rows are staged is counted by itself: its host rows cross the link whether a token chose them or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from q38.kernels.expert_counter import ExpertCounter
from q38.residency.cache import ExpertCache
from q38.residency.readback import Readback

PHASES = ("decode", "prefill")
_STAGED = "staged"  # reported as part of prefill
_COUNTER = 4  # bytes


@dataclass
class _Totals:
    """Since the start. selections: tokens times experts; hits: those whose row lay in device memory.

    host_rows, device_rows: rows read, each once a step however many tokens chose it. staged_rows: host rows that were
        copied to the device first, among host_rows.
    """

    selections: int = 0
    hits: int = 0
    host_rows: int = 0
    device_rows: int = 0
    staged_rows: int = 0


class Traffic:
    """Counters on the device, and what they come to under the placement of the time.

    They must be read before rows move, or reads are charged to the side that a row went to. Exchanges that follow the traffic begin
    when a reading has arrived, so what steps read between its request and the switch, some three tokens' rows, is charged wrong.

    Attributes:
        counts: int64 [layers, experts]: selections since the start, as far as they have been read.
    """

    def __init__(self, cache: ExpertCache, row_bytes: int, device: torch.device) -> None:
        self.cache, self.row_bytes = cache, row_bytes
        kinds = (*PHASES, _STAGED)
        self._counters = {kind: ExpertCounter(cache.layers, cache.experts, device) for kind in kinds}
        self._last: dict[str, NDArray[np.uint32]] = {
            kind: np.zeros((2, cache.layers, cache.experts), np.uint32) for kind in kinds
        }
        self.totals = {phase: _Totals() for phase in PHASES}
        self.counts = np.zeros((cache.layers, cache.experts), np.int64)
        addresses = [counter.counts.data_ptr() for counter in self._counters.values()]
        self._readback = Readback(cache.store, addresses, 2 * _COUNTER * self.counts.size)

    def add(self, phase: str, layer: int, ids: torch.Tensor) -> None:
        """Count a step of one layer. ids: int32 [tokens, top_k], contiguous."""
        self._counters[phase].add(layer, ids)

    def add_staged(self, layer: int, ids: torch.Tensor, host_rows: int) -> None:
        """The same for a prompt step that `host_rows` rows were copied for."""
        self._counters[_STAGED].add(layer, ids)
        self.totals["prefill"].host_rows += host_rows
        self.totals["prefill"].staged_rows += host_rows

    def collect(self) -> None:
        """Bring the totals up to date. Waits for the device."""
        self._readback.drop()  # older than what is read here
        self._add_up({kind: counter.read() for kind, counter in self._counters.items()})

    @property
    def pending(self) -> bool:
        """A reading was asked for and is not there yet."""
        return self._readback.pending

    def request(self) -> None:
        """Ask for a reading of what the steps enqueued so far count."""
        self._readback.request()

    def arrived(self) -> bool:
        """Whether it is there, and added up by now; True once for a request."""
        if not self._readback.arrived():
            return False
        shape = (len(self._counters), 2, *self.counts.shape)
        found = self._readback.memory.view(np.uint32).reshape(shape)
        self._add_up(dict(zip(self._counters, found, strict=True)))
        return True

    def _add_up(self, now: Mapping[str, NDArray[np.uint32]]) -> None:
        """now: uint32 [2, layers, experts] of each kind."""
        resident = self.cache.resident.reshape(-1).astype(np.int64)  # [L * E]
        for kind, found in now.items():
            if np.array_equal(found, self._last[kind]):
                continue
            # Unsigned: right across a wrap-around.
            selections, reads = (found - self._last[kind]).astype(np.int64).reshape(2, -1)
            self._last[kind] = found.copy()
            total = self.totals["prefill" if kind == _STAGED else kind]
            total.selections += int(selections.sum())
            total.hits += int(selections @ resident)
            on_device = int(reads @ resident)
            total.device_rows += on_device
            if kind != _STAGED:
                total.host_rows += int(reads.sum()) - on_device
            self.counts += selections.reshape(self.counts.shape)

    def status(self, top_k: int) -> dict[str, Any]:
        """Per phase: tokens, hit_rate, and bytes of host rows read: in all, of them copied ahead, and per token."""
        found = {}
        for phase, total in self.totals.items():
            tokens = total.selections / (top_k * self.cache.layers)
            nbytes = total.host_rows * self.row_bytes
            found[phase] = {
                "tokens": round(tokens),
                "hit_rate": total.hits / total.selections if total.selections else None,
                "host_bytes": nbytes,
                "staged_bytes": total.staged_rows * self.row_bytes,
                "device_bytes": total.device_rows * self.row_bytes,
                "host_bytes_per_token": nbytes / tokens if tokens else None,
            }
        return found
