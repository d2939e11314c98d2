"""Device memory behind the pages of a pool: mapped when pages are handed out, given back when the pool is idle.

Every buffer has addresses for the whole context. A page is usable once each chunk that it touches in each
buffer is backed. Before memory is taken, `headroom` bytes must stay for the working memory of a step, free or kept by
torch from the step before: a lender (the expert cache) is asked to shrink first; what it cannot give is refused, down
to half the headroom.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import ResourceError
from q38.base.units import format_bytes
from q38.kvcache.addressing import Paging, chunks_of
from q38.kvcache.chunks import SparseArena
from q38.kvcache.layout import KvLayout, Part
from q38.residency.driver import CudaError, Driver

if TYPE_CHECKING:
    import torch

NOBODYS = 0  # page of padded steps
_RETRY = 64 * 2**20  # asked for on top after the driver ran out: others may take some meanwhile


class KvRefused(ResourceError):
    """Pages that cannot be backed. `fits`: tokens that could be."""

    def __init__(self, tokens: int, fits: int, free: int, *, short: int) -> None:
        super().__init__(
            f"{tokens} tokens of KV cache do not fit: {format_bytes(free)} of GPU memory are free, {format_bytes(short)} short; "
            f"{fits} tokens would fit",
            where="KV cache",
            remedy="shorten the prompt or wait for other requests",
        )
        self.tokens, self.fits = tokens, fits


class Lender(Protocol):
    """Whoever gives device memory away for the KV cache."""

    def available(self) -> int:
        """Bytes that `lend` could give."""

    def lend(self, nbytes: int) -> None:
        """Give at least so many bytes back to the driver, or as many as there are."""

    def take_back(self) -> None:
        """The KV cache needs less again."""

    def kept(self) -> int:
        """Bytes that steps have for themselves beyond what the driver counts as free."""

    def give_back(self) -> None:
        """Turn what is kept into memory that is free."""


class Nobody:
    """No lender: what is free is all there is."""

    def available(self) -> int:
        """Nothing."""
        return 0

    def lend(self, nbytes: int) -> None:
        """Give nothing."""

    def take_back(self) -> None:
        """Take nothing."""

    def kept(self) -> int:
        """Nothing."""
        return 0

    def give_back(self) -> None:
        """Give nothing back."""


class Backing:
    """Chunks of every buffer of a pool, by page.

    Args:
        headroom: bytes of device memory to leave free.
        limit: the most bytes to map; None: all there are.
        lender: asked for memory before anything is refused.
        chunk: bytes mapped at once, a multiple of the driver's granularity (its default).

    Raises:
        CudaError: no addresses, or no memory for the page of padded steps.
    """

    def __init__(
        self,
        driver: Driver,
        layout: KvLayout,
        paging: Paging,
        *,
        headroom: int = 0,
        limit: int | None = None,
        lender: Lender | None = None,
        chunk: int | None = None,
    ) -> None:
        self._driver, self.layout, self.paging = driver, layout, paging
        self.headroom, self.limit, self.lender = headroom, limit, lender or Nobody()
        self.chunk = chunk or driver.granularity
        self._arenas: list[tuple[int, SparseArena]] = []  # bytes of a page, addresses
        self._of: dict[Part, SparseArena] = {}
        try:
            for part in layout.parts():
                arena = SparseArena(driver, paging.slots * part.row_bytes, self.chunk)
                self._of[part] = arena
                self._arenas.append((paging.size * part.row_bytes, arena))
            self._held = np.zeros(paging.pages + 1, bool)
            # Chunk counts are the same for all buffers with rows of one width.
            self._needed = {width: np.zeros(arena.chunks, np.int32) for width, arena in self._arenas}
            self._map([NOBODYS])
        except CudaError:
            with suppress(CudaError):
                self.close()
            raise

    def address(self, part: Part) -> int:
        """First address of a buffer; the whole of it is reserved, the pages held are backed."""
        return self._of[part].base

    @property
    def held(self) -> NDArray[np.bool_]:
        """bool [pages + 1]: the pages that are in use, page 0 among them."""
        return self._held.copy()

    @property
    def committed(self) -> int:
        """Bytes that the driver holds for the pool."""
        return sum(arena.committed for _, arena in self._arenas)

    def missing(self, pages: Iterable[int]) -> int:
        """Bytes that the driver would have to give to back these pages."""
        return self._missing([page for page in pages if not self._held[page]])

    def at_hand(self) -> float:
        """Bytes that can be taken without asking the lender for any, the headroom left whole."""
        return min(self._free() + self.lender.kept() - self.headroom, self._left())

    def ensure(self, pages: Iterable[int]) -> int:
        """Back pages that are about to be handed out.

        Returns:
            bytes newly taken from the driver.

        Raises:
            KvRefused: they do not fit; no page has changed hands, and no memory was kept.
        """
        new = [int(p) for p in np.unique(np.fromiter(pages, np.int64)) if not self._held[p]]
        if not new:
            return 0
        nbytes = self._missing(new)
        self._require(nbytes, len(new))
        before = self.committed
        try:
            self._map(new)
        except CudaError:
            self.lender.give_back()  # another process was faster
            self._borrow(nbytes + _RETRY)
            try:
                self._map(new)
            except CudaError as error:
                raise self._refusal(len(new), nbytes, because=error) from error
        return self.committed - before

    def trim(self, free: Iterable[int]) -> int:
        """Pages nobody uses any more: give back every chunk that only such pages touch.

        No kernel may still use them: wait for the device first.

        Returns:
            bytes given back to the driver.

        Raises:
            CudaError: the driver refused; what it kept is counted in `committed`.
        """
        gone = [int(p) for p in np.unique(np.fromiter(free, np.int64)) if p != NOBODYS and self._held[p]]
        self._count(gone, -1)
        self._held[gone] = False
        before = self.committed
        for width, arena in self._arenas:
            for chunk in arena.held():
                if self._needed[width][chunk] == 0:
                    arena.unmap(chunk)
        return before - self.committed

    def refusal(self, tokens: int, *, reusable: int = 0) -> KvRefused | None:
        """Why so many tokens of one sequence do not fit, None where they do.

        Taken together, as a pool that is mostly free hands its pages out; scattered pages may touch more chunks.

        Args:
            reusable: pages that are backed and that the sequence may have.
        """
        pages = max(self.paging.pages_for(tokens) - reusable, 0)
        free = int((~self._held).sum())
        need = self._worst(pages)
        if pages <= free and (need == 0 or need <= self._room()):
            return None
        return self._refusal(pages, need, tokens=tokens, reusable=reusable)

    def close(self) -> None:
        """Give all memory and addresses back."""
        for _, arena in self._arenas:
            arena.close()
        self._arenas, self._of = [], {}

    def _map(self, pages: Sequence[int]) -> None:
        """Back pages and count them; on failure everything is as before."""
        taken: list[tuple[SparseArena, int]] = []
        try:
            for width, arena in self._arenas:
                for chunk in sorted({c for page in pages for c in chunks_of(page, width, self.chunk)}):
                    if not arena.readable(chunk):
                        taken.append((arena, chunk))
                        arena.map(chunk)
        except CudaError:
            for arena, chunk in taken:
                with suppress(CudaError):
                    arena.unmap(chunk)
            raise
        self._held[pages] = True
        self._count(pages, 1)

    def _count(self, pages: Sequence[int], by: int) -> None:
        for width, needed in self._needed.items():
            for page in pages:
                touched = chunks_of(page, width, self.chunk)
                needed[touched.start : touched.stop] += by

    def _missing(self, pages: Sequence[int]) -> int:
        chunks = {
            width: {c for page in pages for c in chunks_of(page, width, self.chunk)} for width in self._needed
        }
        return sum(
            self.chunk for width, arena in self._arenas for c in chunks[width] if not arena.readable(c)
        )

    def _worst(self, pages: int) -> int:
        """Bytes that so many pages may take beyond what is backed and free."""
        if pages == 0:
            return 0
        spare = {
            width: int(
                np.count_nonzero(
                    [arena.readable(c) and self._needed[width][c] == 0 for c in range(arena.chunks)]
                )
            )
            for width, arena in dict(self._arenas).items()
        }
        chunks = {width: max(-(-pages * width // self.chunk) + 1 - spare[width], 0) for width in self._needed}
        return sum(chunks[width] * self.chunk for width, _ in self._arenas)

    def _room(self) -> float:
        """Bytes that can be taken, the lender's included, before half the headroom is touched."""
        there = self._free() + self.lender.kept() - self.headroom // 2 + self.lender.available()
        return min(there, self._left())

    def _free(self) -> int:
        """Bytes that the driver has free."""
        return self._driver.memory()[0]

    def _left(self) -> float:
        """Bytes below the limit."""
        return math.inf if self.limit is None else self.limit - self.committed

    def _require(self, nbytes: int, pages: int) -> None:
        if nbytes == 0:
            return
        if nbytes > self._left():
            raise self._refusal(pages, nbytes)
        short = nbytes + self.headroom - self._free() - self.lender.kept()
        if short > 0:
            self._borrow(short)
        if nbytes > self._free():
            self.lender.give_back()
        free = self._free()
        if nbytes > free or free + self.lender.kept() - nbytes < self.headroom // 2:
            raise self._refusal(pages, nbytes)

    def _borrow(self, nbytes: int) -> None:
        with suppress(ResourceError):  # what it cannot give now is refused like what it does not have
            self.lender.lend(nbytes)

    def _refusal(
        self,
        pages: int,
        nbytes: int,
        *,
        tokens: int | None = None,
        reusable: int = 0,
        because: Exception | None = None,
    ) -> KvRefused:
        room, size = max(self._room(), 0), self.paging.size
        unused = int((~self._held).sum())
        more = bisect_right(range(unused + 1), room, key=self._worst) - 1
        fits = (more + reusable) * size
        free = int(min(self._free() + self.lender.kept(), self._left()))
        wanted = pages * size if tokens is None else tokens
        short = int(max(nbytes - room, 0)) if because is None else nbytes
        return KvRefused(wanted, min(fits, wanted), free, short=short)


def map_memory(backing: Backing, driver: Driver) -> Callable[[Part, int], torch.Tensor]:
    """`Memory` for a KvPool: tensors over the reserved addresses of a backing."""

    def take(part: Part, nbytes: int) -> torch.Tensor:
        return driver.tensor(backing.address(part), nbytes)

    return take
