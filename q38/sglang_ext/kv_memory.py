"""Memory behind a quantized KV cache: taken when the scheduler is about to hand out pages, given back when idle.

The scheduler must never hand out a page without memory: its allocation cannot fail without ending the server. So
memory for a step is made sure of before the step is scheduled, and a request that does not fit is ended by itself:
at admission with status 400 and what would fit, in mid-prefill and in decode with status 503.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from q38.base.errors import ResourceError
from q38.base.units import MIB, format_bytes
from q38.kvcache.addressing import Paging
from q38.kvcache.backing import Backing, KvRefused, map_memory
from q38.kvcache.layout import KvLayout
from q38.residency.driver import Cuda, Driver
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.host_memory import HostMemory
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.targets import ALLOCATOR, SCHEDULE_BATCH, SCHEDULER

if TYPE_CHECKING:
    import torch

    from q38.kvcache.pool import Memory

logger = logging.getLogger(__name__)
_INTERNAL, _BUSY, _REFUSED = 500, 503, 400  # HTTP status
_MORE = 256 * MIB  # taken from the expert cache on top, so that a long prefill asks seldom
_state: KvMemory | None = None


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(SCHEDULER + ".get_new_batch_prefill", "around", new_prefill),
        Hook(SCHEDULER + ".on_idle", "around", on_idle),
        Hook(SCHEDULE_BATCH + ".check_decode_mem", "around", check_decode),
        Hook(SCHEDULE_BATCH + ".retract_decode", "after", end_decode),
        Hook(ALLOCATOR + ".alloc", "around", alloc),
        Hook(ALLOCATOR + ".alloc_extend", "around", alloc_extend),
        Hook(ALLOCATOR + ".alloc_decode", "around", alloc_decode),
    ]


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
        import torch

        if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            return 0
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
        # Memory of captured graphs is in pools of its own, which no other step may use.
        return sum(
            s["total_size"] for s in segments if not s["active_size"] and s["segment_pool_id"] == (0, 0)
        )

    def give_back(self) -> None:
        """Have torch return that memory to the driver; the next step takes it again, which costs it some 50 ms."""
        import torch

        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()


class KvMemory:
    """The backing of this process's KV cache, and what the scheduler's hooks need of it."""

    def __init__(self, backing: Backing, quiesce: Callable[[], None]) -> None:
        self.backing, self._quiesce = backing, quiesce
        self._changed, self._free = False, -1

    def ensure(self, allocator: Any, pages: int) -> None:
        """Back the pages that the allocator hands out next.

        Raises:
            KvRefused: they do not fit.
        """
        if pages > 0:
            if pages > len(allocator.free_pages):
                allocator.merge_and_sort_free()
            if self.backing.ensure(allocator.free_pages[:pages].tolist()):
                self._changed = True

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
        """Give back what only free pages use; the server is idle. Low pages are handed out first from then on."""
        self._quiesce()
        self._changed, self._free = False, allocator.available_size()
        allocator.free_pages = allocator.get_all_free_pages().sort()[0]
        allocator.staged_pages, allocator.num_staged_pages = [], 0
        given = self.backing.trim(allocator.free_pages.tolist())
        if given:
            logger.info("q38: %s of KV cache are back with the driver", format_bytes(given))
            self.backing.lender.take_back()
        return given


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
    import torch

    return Cuda(device.index or 0), lambda: torch.cuda.synchronize(device)


def new_prefill(original: Callable[..., Any], self: Any, running_batch: Any) -> Any:
    """Memory for the next prefill step first; a request that cannot get it is ended, or waits for those that run."""
    if _state is None or not (self.chunked_req or self.waiting_queue):
        return original(self, running_batch)
    alone = running_batch.is_empty() and self.chunked_req is None
    if alone and (refused := _never_fits(self)) is not None:
        _end_waiting(self, str(refused), _REFUSED)
        return _no_prefill(running_batch)
    try:
        _ensure(self, _prefill_pages(self))
    except KvRefused as refused:
        logger.warning("q38: prefill: %s", refused)
        if self.chunked_req is not None:
            done, total = self.chunked_req.prefix_len, len(self.chunked_req.origin_input_ids)
            told = f"no memory for the KV cache after {done} of {total} tokens of the prompt; {done + refused.fits} would fit"
            self.chunked_req.discard_output_reason = _abort(told, _BUSY)
            self._pending_chunked_abort_req = self.chunked_req
            self.process_pending_chunked_abort()
        elif alone:
            _end_waiting(self, str(refused), _BUSY)
        return _no_prefill(running_batch)
    return original(self, running_batch)


def check_decode(original: Callable[..., bool], self: Any, selected_indices: list[int] | None = None) -> bool:
    """Whether the next decode step fits, in memory too. SGLang retracts or ends requests until it does."""
    if not original(self, selected_indices):
        return False
    if _state is None:
        return True
    allocator = self.token_to_kv_pool_allocator
    tokens = self.new_tokens_required_next_decode(selected_indices)
    try:
        _state.ensure(allocator, -(-int(tokens) // allocator.page_size))
    except KvRefused as refused:
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
    if _state is not None and pages:
        _state.ensure(allocator, pages)


def _ensure(scheduler: Any, pages: int) -> None:
    """Back the next pages; finished prefixes in the cache make room where nothing else does."""
    assert _state is not None
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    try:
        _state.ensure(allocator, pages)
    except KvRefused:
        if not (evictable := int(cache.evictable_size())):
            raise
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        # Their pages are backed, and they come first among the free ones.
        cache.evict(EvictParams(num_tokens=min(evictable, pages * allocator.page_size)))
        _state.ensure(allocator, pages)


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
    from sglang.srt.managers.io_struct import AbortReq

    req = scheduler.waiting_queue[0]
    scheduler.abort_request(AbortReq(rid=req.rid, finished_reason=_abort(message, status).to_json()))


def _no_prefill(running_batch: Any) -> Any:
    from sglang.srt.managers.schedule_batch import NextBatchPlan

    return NextBatchPlan(batch_to_run=None, running_batch=running_batch)
