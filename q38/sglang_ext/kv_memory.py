"""Memory behind a quantized KV cache: taken when the scheduler is about to hand out pages, given back when idle.

The scheduler must never hand out a page without memory: its allocation cannot fail without ending the server. So
memory for a step is made sure of before the step is scheduled, and a request that does not fit is ended by itself:
at admission with status 400 and what would fit, in mid-prefill and in decode with status 503.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from q38.base.errors import ResourceError
from q38.base.units import format_bytes
from q38.kvcache.addressing import Paging, in_ring_order
from q38.kvcache.backing import Backing, KvRefused, map_memory
from q38.kvcache.layout import KvLayout
from q38.residency.driver import Cuda, Driver
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.host_memory import HostMemory
from q38.sglang_ext.kv_lender import ExpertLender
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.targets import ALLOCATOR, GRAMMARS, SCHEDULE_BATCH, SCHEDULER

if TYPE_CHECKING:
    from q38.kvcache.pool import Memory

logger = logging.getLogger(__name__)
_INTERNAL, _BUSY, _REFUSED = 500, 503, 400  # HTTP status
_state: KvMemory | None = None


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(SCHEDULER + ".get_new_batch_prefill", "around", new_prefill),
        Hook(GRAMMARS + ".get_ready_grammar_requests", "around", ready_grammars),
        Hook(SCHEDULER + ".on_idle", "around", on_idle),
        Hook(SCHEDULE_BATCH + ".check_decode_mem", "around", check_decode),
        Hook(SCHEDULE_BATCH + ".retract_decode", "after", end_decode),
        Hook(ALLOCATOR + ".alloc", "around", alloc),
        Hook(ALLOCATOR + ".alloc_extend", "around", alloc_extend),
        Hook(ALLOCATOR + ".alloc_decode", "around", alloc_decode),
    ]


class KvMemory:
    """The backing of this process's KV cache, and what the scheduler's hooks need of it.

    Attributes:
        prefixes: SGLang's prefix cache, once the scheduler has shown it.
        waits: what the scheduler was like when a request was last found to have to wait for memory.
        grammars_taken: requests whose grammar is ready are in the queue already.
    """

    def __init__(self, backing: Backing, quiesce: Callable[[], None]) -> None:
        self.backing, self._quiesce = backing, quiesce
        self.prefixes: Any = None
        self.waits: tuple[Any, ...] | None = None
        self.grammars_taken = False
        self._changed, self._free = False, -1
        ring, size = backing.layout.ring, backing.paging.size
        self._ring = 0 if ring % size else ring // size  # pages
        self._handed = deque[int](maxlen=self._ring)  # pages handed out, the newest last

    def ensure(self, allocator: Any, pages: int, *, now: bool = False) -> None:
        """Back the pages that the allocator hands out next. Finished prefixes make room where nothing else does.

        Args:
            now: they are handed out at once, and exactly so many.

        Raises:
            KvRefused: they do not fit.
        """
        if pages <= 0:
            return
        try:
            handed = self._back(allocator, pages)
        except KvRefused:
            if not (evictable := 0 if self.prefixes is None else int(self.prefixes.evictable_size())):
                raise
            from sglang.srt.mem_cache.base_prefix_cache import EvictParams

            # Their pages are backed, and they come first among the free ones.
            self.prefixes.evict(EvictParams(num_tokens=min(evictable, pages * allocator.page_size)))
            handed = self._back(allocator, pages)
        if now:
            self._handed.extend(handed)

    def _back(self, allocator: Any, pages: int) -> list[int]:
        """Choose the pages that come next and back them."""
        if pages > len(allocator.free_pages):
            allocator.merge_and_sort_free()
        handed: list[int] = allocator.free_pages[:pages].tolist()
        if self._ring:
            if _meet(handed, self._ring):
                handed = _put(allocator, self._in_order(allocator.free_pages))[:pages]
            # Room in the ring is worth no expert rows: where memory is short, pages that have some come first, then low ones.
            if (wanted := self.backing.missing(handed)) and wanted > self.backing.at_hand():
                free = np.sort(allocator.free_pages.cpu().numpy())
                handed = _put(allocator, free[np.argsort(~self.backing.held[free], kind="stable")])[:pages]
        if self.backing.ensure(handed):
            self._changed = True
        return handed

    def _in_order(self, free: torch.Tensor) -> NDArray[np.integer]:
        """Free pages as they are to be handed out: low ones first; with a ring, on from the newest page that is still in use."""
        pages = np.sort(free.cpu().numpy())
        if not self._ring:
            return pages
        unused = set(pages.tolist())
        newest = next((page for page in reversed(self._handed) if page not in unused), 0)
        return in_ring_order(pages, self._ring, newest + 1)

    def status(self) -> dict[str, Any]:
        """Format and bytes, for the control interface."""
        layout, paging = self.backing.layout, self.backing.paging
        return {
            "format": layout.name,
            "tokens": paging.tokens,
            "bytes_per_token": layout.bytes_per_token(paging.tokens),
            "mapped_bytes": self.backing.committed,
            "ring_bytes": layout.ring_bytes,
            "kept_for_steps_bytes": self.backing.lender.kept(),
        }

    def stale(self, allocator: Any) -> bool:
        """Whether pages were mapped or freed since the last trim."""
        return self._changed or allocator.available_size() != self._free

    def trim(self, allocator: Any) -> int:
        """Give back what only free pages use; the server is idle. Low pages are handed out first from then on, with a ring in its order."""
        self._quiesce()
        self._changed, self._free = False, allocator.available_size()
        free = self._in_order(allocator.get_all_free_pages())
        allocator.staged_pages, allocator.num_staged_pages = [], 0
        given = self.backing.trim(_put(allocator, free))
        if given:
            logger.info("q38: %s of KV cache are back with the driver", format_bytes(given))
            self.backing.lender.take_back()
        return given


def _meet(pages: list[int], ring: int) -> bool:
    """Whether pages that are written one after the other take each other's places in a ring of so many pages."""
    newest = pages[-ring:]
    return len({page % ring for page in newest}) < len(newest)


def _put(allocator: Any, pages: NDArray[np.integer]) -> list[int]:
    """Have the allocator hand its free pages out in this order."""
    allocator.free_pages = torch.from_numpy(pages).to(allocator.free_pages)
    return pages.tolist()  # type: ignore[no-any-return]


def open_memory(
    layout: KvLayout, tokens: int, page_size: int, device: torch.device, options: ExtensionOptions
) -> Memory | None:
    """Where a pool of so many tokens gets its buffers: reserved addresses, or None for ordinary memory."""
    global _state
    if not options.kv_lazy:
        return None
    driver, quiesce = _driver(device)
    lender = ExpertLender(options.kv_headroom)
    paging = Paging(tokens, page_size)
    backing = Backing(
        driver, layout, paging, headroom=options.kv_headroom, limit=options.kv_limit, lender=lender
    )
    _state = KvMemory(backing, quiesce)
    from q38.sglang_ext import residency

    if (stored := residency.loaded()) is not None:
        stored.others["kv_memory"] = _state.status
    return map_memory(backing, driver)


def _driver(device: torch.device) -> tuple[Driver, Callable[[], None]]:
    if device.type != "cuda":
        return HostMemory(), lambda: None
    return Cuda(device.index or 0), lambda: torch.cuda.synchronize(device)


def new_prefill(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    """Memory for the next prefill step first; a request that cannot get it is ended, or waits for those that run."""
    if _state is None:
        return original(self, running_batch)
    _state.prefixes = self.tree_cache
    # SGLang would take requests whose grammar is ready only in there, after the look at what those that wait need.
    if self.grammar_manager.has_waiting_grammars():
        for req in self.grammar_manager.get_ready_grammar_requests():
            self._add_request_to_queue(req)
    _state.grammars_taken = True
    try:
        return _prefill(original, self, running_batch)
    finally:
        _state.grammars_taken = False


def ready_grammars(original: Callable[..., list[Any]], self: Any) -> list[Any]:
    """Requests whose grammar is ready; none where new_prefill has just taken them."""
    return [] if _state is not None and _state.grammars_taken else original(self)


def _prefill(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    assert _state is not None
    if _admits_nothing(self, running_batch):
        return original(self, running_batch)
    alone = running_batch.is_empty() and self.chunked_req is None
    if alone and (refused := _never_fits(self)) is not None:
        _end_waiting(self, str(refused), _REFUSED)
        return _no_prefill(running_batch)
    if self.chunked_req is None and _state.waits == _situation(self, running_batch):
        return _no_prefill(running_batch)
    try:
        _state.ensure(self.token_to_kv_pool_allocator, _prefill_pages(self))
    except ResourceError as error:
        logger.warning("q38: prefill: %s", error)
        if self.chunked_req is not None:
            done, total = self.chunked_req.prefix_len, len(self.chunked_req.origin_input_ids)
            fits = error.fits if isinstance(error, KvRefused) else 0
            told = f"no memory for the KV cache after {done} of {total} tokens of the prompt; {done + fits} would fit"
            self.chunked_req.discard_output_reason = _abort(told, _BUSY)
            self._pending_chunked_abort_req = self.chunked_req
            self.process_pending_chunked_abort()
        elif alone:
            _end_waiting(self, str(error), _BUSY)
        else:
            _state.waits = _situation(self, running_batch)
        return _no_prefill(running_batch)
    return original(self, running_batch)


def check_decode(original: Callable[..., bool], self: Any, selected_indices: list[int] | None = None) -> bool:
    """Whether the next decode step fits, in memory too. SGLang retracts or ends requests until it does."""
    if not original(self, selected_indices):
        return False
    if _state is None:
        return True
    allocator, _state.prefixes = self.token_to_kv_pool_allocator, self.tree_cache
    tokens = self.new_tokens_required_next_decode(selected_indices)
    try:
        _state.ensure(allocator, -(-int(tokens) // allocator.page_size))
    except ResourceError as refused:
        logger.warning("q38: decode: %s", refused)
        return False
    return True


def end_decode(result: tuple[list[Any], float, list[Any]], _batch: Any) -> tuple[list[Any], float, list[Any]]:
    """The last request, which memory is too small for although nothing else runs: SGLang calls that an internal error."""
    for req in result[2]:
        if _state is not None and req.to_finish.status_code == _INTERNAL:
            done = len(req.origin_input_ids) + len(req.output_ids)
            told = f"no memory for the KV cache after {done} tokens of prompt and answer"
            req.to_finish = _abort(told, _BUSY)
    return result


def on_idle(original: Callable[..., None], self: Any) -> None:
    """Give memory back once nothing runs."""
    allocator = self.token_to_kv_pool_allocator
    if _state is not None and _state.stale(allocator) and self.is_fully_idle():
        try:
            _state.trim(allocator)
        except ResourceError as error:
            logger.warning("q38: memory of the KV cache stays mapped: %s", error)
    original(self)


def alloc(original: Callable[..., Any], self: Any, need_size: int) -> Any:
    """Pages without a sequence."""
    _guard(self, need_size // self.page_size)
    return original(self, need_size)


def alloc_extend(
    original: Callable[..., Any],
    self: Any,
    prefix_lens: Any,
    prefix_lens_cpu: Any,
    seq_lens: Any,
    seq_lens_cpu: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Pages of a prefill step; new_prefill has made sure of them."""
    size = self.page_size
    pages = (-(-seq_lens_cpu // size) + (-prefix_lens_cpu // size)).sum()
    _guard(self, int(pages))
    return original(self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, *args, **kwargs)


def alloc_decode(
    original: Callable[..., Any], self: Any, seq_lens: Any, seq_lens_cpu: Any, *args: Any, **kwargs: Any
) -> Any:
    """Pages of a decode step; check_decode has made sure of them."""
    _guard(self, int(((seq_lens_cpu - 1) % self.page_size == 0).sum()))
    return original(self, seq_lens, seq_lens_cpu, *args, **kwargs)


def _guard(allocator: Any, pages: int) -> None:
    """Unbacked pages would be an illegal access, so a step that slipped through the hooks above fails here instead."""
    if _state is not None:
        _state.ensure(allocator, pages, now=True)


def _admits_nothing(scheduler: Any, running_batch: Any) -> bool:
    """Whether SGLang looks at no waiting request now, whatever memory there is: none waits, or as many run as may."""
    if scheduler.chunked_req is not None:
        return False
    if not scheduler.waiting_queue:
        return True
    if running_batch.is_empty() or scheduler.enable_priority_preemption:
        return False
    if running_batch.batch_is_full and not scheduler.is_hybrid_swa:
        return True
    running = len(running_batch.reqs)
    return bool(scheduler.get_num_allocatable_reqs(running, running_batch=running_batch) <= 0)


def _situation(scheduler: Any, running_batch: Any) -> tuple[Any, ...]:
    """What has to change before a request that waits for memory is worth another look."""
    free = scheduler.token_to_kv_pool_allocator.available_size()
    return free, len(running_batch.reqs), scheduler.waiting_queue[0].rid


def _never_fits(scheduler: Any) -> KvRefused | None:
    """Why the next request does not fit although nothing else runs."""
    assert _state is not None
    allocator, req = scheduler.token_to_kv_pool_allocator, scheduler.waiting_queue[0]
    # Pages of finished requests are backed until the server is idle, those of prefixes until they are evicted.
    free = _state.backing.held[allocator.get_all_free_pages().cpu().numpy()].sum()
    kept = int(scheduler.tree_cache.evictable_size()) // allocator.page_size
    return _state.backing.refusal(len(req.origin_input_ids), reusable=int(free) + kept)


def _prefill_pages(scheduler: Any) -> int:
    """The most pages that the next prefill step takes. It may be more than there are: SGLang then evicts backed ones."""
    size, waiting = scheduler.token_to_kv_pool_allocator.page_size, scheduler.waiting_queue
    step = -(-(scheduler.chunked_prefill_size or scheduler.max_total_num_tokens) // size)
    wanted = sum(-(-(len(req.origin_input_ids) + len(req.output_ids)) // size) for req in waiting)
    if scheduler.chunked_req is not None:
        wanted += step + 1
    return int(min(wanted, step + len(waiting) + 1))


def _abort(message: str, status: int) -> Any:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    kind = "BadRequestError" if status == _REFUSED else "ServiceUnavailableError"
    return FINISH_ABORT(message, status, kind)


def _end_waiting(scheduler: Any, message: str, status: int) -> None:
    """End the request that is next, and only that one: SGLang ends all whose names begin with the one it is given."""
    from sglang.srt.managers.io_struct import AbortReq

    grammars = scheduler.grammar_manager
    queue, constrained = scheduler.waiting_queue, grammars.grammar_queue
    scheduler.waiting_queue, grammars.grammar_queue = queue[:1], []
    try:
        scheduler.abort_request(AbortReq(rid=queue[0].rid, finished_reason=_abort(message, status).to_json()))
    finally:
        scheduler.waiting_queue, grammars.grammar_queue = scheduler.waiting_queue + queue[1:], constrained


def _no_prefill(running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
