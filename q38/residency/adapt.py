"""Online adaptation: count selections on the device, and swap a few rows at a time to follow them.

Nothing here waits for the device. Kernels (or `count`) add to the counters; every `interval` tokens a
safe point enqueues their copy to pinned memory, and a later one reads it, updates the heat and starts
the swaps that gain most, which later safe points complete.

Off by default (no swaps): a static placement is as good on a steady workload. `q38 plan --trace` shows
what swaps gain on a recorded one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from q38.residency.cache import ExpertCache, Heat
from q38.residency.heat import HeatTracker, choose_swaps

if TYPE_CHECKING:
    import torch

COUNTER = 4  # bytes


@dataclass(frozen=True)
class AdaptSettings:
    """swaps: pairs of rows exchanged per interval at most, 0 = count only; the rest in tokens.

    A pair must gain one selection in `half_life` tokens, which pays for its one row over the link.
    """

    swaps: int = 0
    interval: int = 32
    half_life: float = 2000.0
    prior_tokens: float = 2000.0


class Adapter:
    """Follows the workload. Call `step` at every safe point between steps, from the cache's thread.

    Args:
        cache: opened with at least `scratch_bytes` of scratch memory.
        prior: [layers, experts], selections per token in the profile.
        top_k: experts per token.

    Raises:
        OutOfMemory: no device memory for the counters.
    """

    def __init__(
        self, cache: ExpertCache, prior: Heat, *, top_k: int, settings: AdaptSettings | None = None
    ) -> None:
        self.cache, self.top_k, self.settings = cache, top_k, settings or AdaptSettings()
        self.tracker = HeatTracker(
            prior, prior_tokens=self.settings.prior_tokens, half_life=self.settings.half_life
        )
        self._driver = cache.store.driver
        self._nbytes = scratch_bytes(cache.layers, cache.experts)
        staging, self._staging_address = cache.store.pool.take_scratch(self._nbytes)
        self._staging = staging.view(np.uint32)
        self._last = np.zeros(cache.layers * cache.experts, np.uint32)
        self._event = self._driver.new_event()
        self.address = self._driver.allocate(self._nbytes)
        self._driver.tensor(self.address, self._nbytes).zero_()
        self._since = 0
        self._reading = False

    @property
    def counters(self) -> torch.Tensor:
        """int32 [layers, experts] on the device: selections since start, wrapping around. Kernels may add to it."""
        import torch

        flat = self._driver.tensor(self.address, self._nbytes).view(torch.int32)
        return flat.view(self.cache.layers, self.cache.experts)

    def count(self, layer: int, ids: torch.Tensor) -> None:
        """Add one to the counter of each of `ids` (any shape, on the device). May be captured in a graph."""
        import torch

        chosen = ids.reshape(-1).long()
        ones = torch.ones((), dtype=torch.int32, device=ids.device).expand(chosen.numel())
        self.counters[layer].scatter_add_(0, chosen, ones)

    def step(self, tokens: int = 1) -> int:
        """Advance by what can be done without waiting.

        Args:
            tokens: tokens computed since the last call.

        Returns:
            pairs of rows whose exchange was started.

        Raises:
            CudaError: the rows stay readable; the next call goes on.
        """
        store = self.cache.store
        self._since += tokens
        if self._driver.capturing(store.stream) or not store.poll():
            return 0
        if self._reading:
            return self._adapt() if self._driver.done(self._event) else 0
        if self._since >= self.settings.interval:
            to, source = np.array([self._staging_address]), np.array([self.address])
            self._driver.copy(to, source, self._nbytes, store.stream)
            self._driver.record(self._event, store.stream)
            self._since, self._reading = 0, True
        return 0

    def close(self) -> None:
        """Free the counters. No kernel may still use them."""
        self._driver.synchronize(self.cache.store.stream)
        self._driver.deallocate(self.address)

    def _adapt(self) -> int:
        cache, limit = self.cache, self.settings.swaps
        self._reading = False
        counts = self._staging - self._last  # unsigned: right across a wrap-around
        self._last = self._staging.copy()
        tokens = float(counts.sum()) / (cache.layers * self.top_k)
        if tokens:
            self.tracker.add(counts.reshape(cache.layers, cache.experts), tokens)
        rates = self.tracker.rates()
        cache.set_heat(rates)
        gain = 1 / self.settings.half_life
        return cache.begin_swaps(*choose_swaps(rates.ravel(), cache.store.on_device, limit, gain=gain))


def scratch_bytes(layers: int, experts: int) -> int:
    """Pinned scratch memory that an adapter takes from the pool."""
    return layers * experts * COUNTER
