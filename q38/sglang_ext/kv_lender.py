"""Device memory that the expert cache lends to the KV cache: rows move to the host and come back."""

from __future__ import annotations

import logging

import torch

from q38.base.units import MIB, format_bytes

logger = logging.getLogger(__name__)
_MORE = 256 * MIB  # taken from the expert cache on top, so that a long prefill asks seldom


class ExpertLender:
    """The expert cache gives up rows for the KV cache, and takes them back when it needs less.

    reserve: bytes that stay for the working memory of a step.
    """

    def __init__(self, reserve: int) -> None:
        self._reserve, self._lent = reserve, False

    def available(self) -> int:
        """Bytes of rows that could still move to the host."""
        from q38.sglang_ext import residency

        if (stored := residency.loaded()) is None:
            return 0
        cache = stored.cache
        resident = int(cache.resident.sum())
        # By the rows and not by the free slots, of which an exchange under way holds some.
        slots = cache.store.pool.slots.usable - (cache.store.rows - resident) - cache.spare
        return min(max(slots, 0), resident) * stored.layout.row_bytes

    def lend(self, nbytes: int) -> None:
        """Shrink the expert cache."""
        from q38.sglang_ext import residency

        if (stored := residency.loaded()) is not None:
            with stored.gate.move():
                stored.traffic.collect()
                given = stored.cache.free(nbytes + _MORE)
            self._lent = self._lent or given > 0
            if given:
                logger.info("q38: the expert cache gave %s to the KV cache", format_bytes(given))

    def take_back(self) -> None:
        """Grow the expert cache into what is free again."""
        from q38.sglang_ext import residency

        if self._lent and (stored := residency.loaded()) is not None:
            with stored.gate.move():
                stored.traffic.collect()
                rows = stored.cache.fill(max(self._reserve - self.kept(), self._reserve // 4))
            self._lent = False
            logger.info("q38: %d expert rows are back in device memory", rows)

    def kept(self) -> int:
        """Bytes that torch keeps from earlier steps for the next ones."""
        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        # Memory of captured graphs is in pools of its own, which no other step may use.
        return sum(
            s["total_size"] for s in segments if not s["active_size"] and s["segment_pool_id"] == (0, 0)
        )

    def give_back(self) -> None:
        """Have torch return that memory to the driver; the next step takes it again, which costs it some 50 ms."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()
