"""Online adaptation: swap a few rows at a time, so that those in device memory are those that are read.

Nothing here waits for the device. Kernels count selections; every `interval` tokens a safe point asks for the
counters, and a later one that finds them arrived updates the heat and starts the swaps that gain most, which
later safe points complete.

`AdaptSettings()` swaps nothing and only counts. `q38 plan --trace` shows what swaps gain on a recorded workload.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from q38.residency.cache import ExpertCache, Heat
from q38.residency.heat import HeatTracker, choose_swaps


@dataclass(frozen=True)
class AdaptSettings:
    """swaps: pairs of rows exchanged per interval at most, 0 = count only; the rest in tokens.

    A pair must gain one selection in `half_life` tokens, which pays for its one row over the link.
    `prior_tokens`: the evidence that the first profile is worth.
    """

    swaps: int = 0
    interval: int = 32
    half_life: float = 2000.0
    prior_tokens: float = 2000.0


class Counts(Protocol):
    """Selections that are counted on the device, and read without waiting for it.

    counts: int64 [layers, experts], since the start, as far as they have been read. pending: a reading was asked for
    and is not there yet.
    """

    @property
    def counts(self) -> NDArray[np.int64]: ...
    @property
    def pending(self) -> bool: ...
    def request(self) -> None:
        """Ask for a reading of what the steps enqueued so far count."""
        ...

    def arrived(self) -> bool:
        """Whether it is in `counts` by now; True once for a request."""
        ...


class Adapter:
    """Follows the workload. Call `step` at safe points between steps, from the cache's thread.

    Args:
        prior: [layers, experts], how often each is selected by a profile; any unit.
        top_k: experts per token.

    Attributes:
        swapped: pairs of rows whose exchange was started, since the start.
    """

    def __init__(
        self,
        cache: ExpertCache,
        prior: Heat,
        counts: Counts,
        *,
        top_k: int,
        settings: AdaptSettings | None = None,
    ) -> None:
        self.cache, self.counts, self.top_k = cache, counts, top_k
        self.settings = settings or AdaptSettings()
        self.swapped = 0
        self._last = counts.counts.copy()
        self._since = 0
        self.follow(prior, self.settings.prior_tokens)

    def follow(self, prior: Heat, prior_tokens: float) -> None:
        """Begin again from a profile that is worth so many tokens of traffic."""
        selections = np.maximum(prior.sum(1, keepdims=True), 1e-300)
        self.tracker = HeatTracker(
            prior / selections * self.top_k,
            prior_tokens=prior_tokens,
            half_life=self.settings.half_life,
        )

    def step(self, tokens: int = 1) -> int:
        """Advance by what can be done without waiting.

        Args:
            tokens: of the step to come; every `interval` of them the counters are read.

        Returns:
            pairs of rows whose exchange was started.

        Raises:
            CudaError: the rows stay readable; the next call goes on.
        """
        store = self.cache.store
        self._since += tokens
        if store.driver.capturing(store.stream) or not store.poll():
            return 0
        if self.counts.pending:
            return self._adapt() if self.counts.arrived() else 0
        if self._since >= self.settings.interval:
            self.counts.request()
            self._since = 0
        return 0

    def _adapt(self) -> int:
        cache, now = self.cache, self.counts.counts
        selections = now - self._last
        self._last = now.copy()
        tokens = float(selections.sum()) / (cache.layers * self.top_k)
        if tokens:
            self.tracker.add(selections, tokens)
        rates = self.tracker.rates()
        cache.set_heat(rates)
        promote, demote = choose_swaps(
            rates.ravel(), cache.store.on_device, self.settings.swaps, gain=1 / self.settings.half_life
        )
        started = cache.begin_swaps(promote, demote)
        self.swapped += started
        return started
