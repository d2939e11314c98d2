"""Device memory read without waiting: the copy is enqueued behind the steps so far, and looked at once it has arrived."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from q38.residency.pool import Bytes
from q38.residency.store import RowStore


class Readback:
    """Several pieces of device memory, as large as each other, and a pinned copy of them.

    Args:
        sources: device addresses.
        nbytes: of each; the pool must have len(sources) * nbytes of scratch memory left.

    Raises:
        ResourceError: it has not.
    """

    def __init__(self, store: RowStore, sources: Sequence[int], nbytes: int) -> None:
        self._store, self._nbytes = store, nbytes
        self._sources = np.array(sources, dtype=np.int64)
        self.memory: Bytes  # uint8 [len(sources) * nbytes]
        self.memory, address = store.pool.take_scratch(len(sources) * nbytes)
        self._copies = address + nbytes * np.arange(len(sources))
        self._event = store.driver.new_event()
        self.pending = False

    def request(self) -> None:
        """Enqueue the copy. Nothing may be captured meanwhile.

        Raises:
            CudaError: nothing is pending.
        """
        driver, stream = self._store.driver, self._store.stream
        driver.copy(self._copies, self._sources, self._nbytes, stream)
        driver.record(self._event, stream)
        self.pending = True

    def arrived(self) -> bool:
        """Whether `memory` holds what was asked for; True once for a request."""
        if not self.pending or not self._store.driver.done(self._event):
            return False
        self.pending = False
        return True

    def drop(self) -> None:
        """Have no use for what was asked for. The copy itself may still arrive, before that of the next request."""
        self.pending = False
