"""What the tests of the KV hooks run in the process that has imported SGLang; results are JSON."""

from __future__ import annotations

from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.qsa import kernel, sparse_attn
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from q38.base.errors import InputError
from q38.kvcache.layout import TIERED, KvLayout
from q38.residency.driver import OutOfMemory
from q38.sglang_ext import kv_format, kv_memory
from q38.sglang_ext.host_memory import HostMemory
from q38.sglang_ext.kv_format import PackedRows, StoredKv
from q38.sglang_ext.options import ExtensionOptions

HEADS, DIM, LAYERS, TOKENS, PAGE = 2, 64, 2, 256, 64


def make(name: str | None, *, ring: int = 32, **options: Any) -> Any:
    """SGLang's own pool, in one of q38's formats or in bf16."""
    method = None
    if name is not None:
        layout = KvLayout(name, LAYERS, HEADS, DIM, ring if name == TIERED else 0)
        method = StoredKv(layout, ExtensionOptions("", **options), PAGE)
    return MHATokenToKVPool(
        size=TOKENS, page_size=PAGE, dtype=torch.bfloat16, head_num=HEADS, head_dim=DIM, layer_num=LAYERS, device="cpu",
        enable_memory_saver=False, quant_method=method,
    )  # fmt: skip


def filled(name: str | None, tokens: int = 150, **options: Any) -> tuple[Any, torch.Tensor]:
    """A pool with random rows in random slots of layer 1, written in three steps; and the slots in order."""
    generator = torch.Generator().manual_seed(1)
    pool = make(name, **options)
    slots = torch.randperm(TOKENS, generator=generator)[:tokens] + PAGE
    k, v = torch.randn(2, tokens, HEADS, DIM, generator=generator).to(torch.bfloat16)
    layer = SimpleNamespace(layer_id=1)
    for at in (slice(0, 100), slice(100, 101), slice(101, tokens)):
        pool.set_kv_buffer(layer, slots[at], k[at], v[at], 1.0, 1.0)
    return pool, slots


def plain(pool: Any) -> list[torch.Tensor]:
    """Keys and values of layer 1 as float32 [slots, heads, dim], the rows gathered one by one."""
    found = []
    for rows in (pool.get_key_buffer(1), pool.get_value_buffer(1)):
        if isinstance(rows, PackedRows):
            every = torch.arange(rows.shape[0])
            rows = rows.gather(every, torch.zeros(*rows.shape, dtype=torch.float32))
        found.append(rows.float())
    return found


def attention_error(name: str | None) -> float:
    """Mean |difference| of the sparse attention's output from that over a bf16 pool."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(12, 4, DIM, generator=generator).to(torch.bfloat16)
    out = []
    for kind in (None, name):
        pool, slots = filled(kind)
        chosen = torch.stack(
            [slots[torch.randperm(150, generator=torch.Generator().manual_seed(i))[:60]] for i in range(12)]
        )
        chosen[3, 50:] = -1
        out.append(
            kernel.qsa_sparse_attention(
                q, pool.get_key_buffer(1), pool.get_value_buffer(1), chosen, 0.125
            ).float()
        )
    return float((out[0] - out[1]).abs().mean())


def packs_as_sglang(name: str) -> bool:
    """Whether whole contexts come out as SGLang's kernel packs them from the dequantized rows."""
    pool, slots = filled(name)
    table = torch.zeros(3, 128, dtype=torch.int32)
    table[2, :90], table[0, :60] = slots[:90].int(), slots[90:].int()
    cu_k, requests = torch.tensor([0, 90, 150], dtype=torch.int32), torch.tensor([2, 0])
    common = {"req_to_token": table, "req_indices": requests, "cu_k": cu_k, "total_k": 150, "max_k": 90}
    ours = sparse_attn.pack_qsa_prefill_kv(
        k=pool.get_key_buffer(1), v=pool.get_value_buffer(1), output_dtype=torch.float32, **common
    )
    k, v = plain(pool)
    theirs = sparse_attn.pack_qsa_prefill_kv(k=k, v=v, output_dtype=torch.float32, **common)
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def compacts_as_sglang(name: str, *, strided: bool) -> bool:
    """Whether selected rows come out as SGLang's kernel compacts them, in both of its layouts."""
    pool, slots = filled(name)
    table = torch.zeros(3, 160, dtype=torch.int32)
    table[2, :90], table[0, :60], table[1, :1] = slots[:90].int(), slots[90:].int(), slots[:1].int()
    requests, lengths = torch.tensor([2, 0, 1]), torch.tensor([90, 60, 1], dtype=torch.int32)
    topk, stride = 40, 64
    indices = torch.full((3, topk), -1, dtype=torch.int32)
    indices[0] = torch.randperm(90)[:topk].int()
    indices[1, :33] = torch.randperm(60)[:33].int()
    indices[2, :1] = 0
    counts = [topk, 33, 1]
    cu_k = torch.tensor(
        [0, stride, 2 * stride, 3 * stride] if strided else [0, 40, 73, 74], dtype=torch.int32
    )
    width = 3 * (stride if strided else topk)
    k, v = plain(pool)
    results = []
    for keys, values in ((pool.get_key_buffer(1), pool.get_value_buffer(1)), (k, v)):
        out = torch.full((2, width + 5, HEADS, DIM), 7.0)
        sparse_attn.qwen_sparse_kv_extraction_compact_triton(
            keys, values, table, requests, indices, lengths, cu_k, out[0], out[1], 3, topk,
            zero_fill_cols=stride if strided else 0,
        )  # fmt: skip
        results.append(out)
    assert sum(counts) == 74
    return bool(torch.equal(results[0], results[1]) and (results[0][:, width:] == 7).all())


def refusals(name: str) -> list[str]:
    """What each way to read packed rows as if they were plain ones says."""
    pool, slots = filled(name)
    k = pool.get_key_buffer(1)
    ways = {
        "index": lambda: k[slots],
        "index_select": lambda: k.index_select(0, slots),
        "torch": lambda: torch.cat([k, k]),
        "stride": lambda: k.stride(0),
        "cpu copy": lambda: pool.get_cpu_copy(slots),
        "raw": lambda: pool.get_raw_kv_buffer(1),
        "transfer": pool.get_contiguous_buf_infos,
        "move": lambda: pool.move_kv_cache(slots[:1], slots[1:2]),
        "scales": lambda: pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots[:1], *torch.zeros(2, 1, HEADS, DIM), 0.5, 0.5),
    }  # fmt: skip
    said = []
    for what, way in ways.items():
        try:
            way()
        except Exception as error:
            said.append(f"{what}: {type(error).__name__}: {error}")
        else:
            said.append(f"{what}: read")
    return said


def conflict(**changed: Any) -> str:
    """What an option of SGLang beside --kv int4 is told."""
    plain = {
        "enable_hierarchical_cache": False, "disaggregation_mode": "null", "enable_memory_saver": False,
        "speculative_algorithm": None, "tp_size": 1,
    }  # fmt: skip
    configurator = SimpleNamespace(
        server_args=SimpleNamespace(**{**plain, **changed}), kv_cache_dtype=torch.bfloat16
    )
    kept, kv_format.given = kv_format.given, lambda: ExtensionOptions("", kv="int4")
    try:
        kv_format._refuse_combinations(configurator)
    except InputError as error:
        return str(error)
    finally:
        kv_format.given = kept
    return "accepted"


def sizes(name: str | None) -> list[int]:
    """[bytes of keys and values by SGLang's count, heads x dim of the shape that it is told]."""
    pool = make(name)
    return [int(sum(pool.get_kv_size_bytes())), *pool.get_kv_buffer_shape()[0]]


def lazy_life(name: str) -> dict[str, Any]:
    """SGLang's paged allocator over a lazily backed pool: bytes at each point of a life."""
    pool = make(name, kv_lazy=True)
    state = kv_memory._state
    assert state is not None
    allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", pool, need_sort=False)
    committed = [state.backing.committed]
    first = allocator.alloc(2 * PAGE)
    committed.append(state.backing.committed)
    lengths = torch.tensor([PAGE + 1])
    second = allocator.alloc_extend(
        torch.tensor([0]), torch.tensor([0]), lengths, lengths, torch.tensor([-1]), PAGE + 1
    )
    held = state.backing.held.nonzero()[0].tolist()
    k, v = torch.randn(2, len(second), HEADS, DIM).to(torch.bfloat16)
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), second, k, v)
    before = pool.get_key_buffer(0).gather(second, torch.empty(len(second), HEADS, DIM)).clone()
    allocator.free(first)
    state.trim(allocator)
    after = pool.get_key_buffer(0).gather(second, torch.empty(len(second), HEADS, DIM))
    committed.append(state.backing.committed)
    allocator.free(second)
    state.trim(allocator)
    committed.append(state.backing.committed)
    kv_memory._state = None
    return {
        "committed": committed,
        "held": held,
        "kept": bool(torch.equal(before, after)),
        "free": allocator.available_size(),
    }


class Small(HostMemory):
    """Ordinary memory with an end."""

    left = 0

    def __init__(self, nbytes: int) -> None:
        super().__init__()
        self.left, self.sizes = nbytes, {}

    def memory(self) -> tuple[int, int]:
        return self.left, self.left

    def create(self, nbytes: int) -> int:
        if nbytes > self.left:
            raise OutOfMemory("create")
        handle = super().create(nbytes)
        self.left, self.sizes[handle] = self.left - nbytes, nbytes
        return handle

    def release(self, handle: int) -> None:
        self.left += self.sizes.pop(handle)


def named(rid: str, tokens: int) -> Any:
    """A request that waits with a prompt of so many tokens."""
    return SimpleNamespace(origin_input_ids=[1] * tokens, output_ids=[], rid=rid)


class Grammars:
    """Requests whose grammar is compiled, and those whose grammar has just become ready."""

    def __init__(self) -> None:
        self.grammar_queue: list[Any] = []
        self.ready: list[Any] = []

    def has_waiting_grammars(self) -> bool:
        return bool(self.grammar_queue or self.ready)

    def get_ready_grammar_requests(self) -> list[Any]:
        """Once each, and through the hook, as SGLang's own call goes."""

        def take(_self: Any) -> list[Any]:
            taken, self.ready = self.ready, []
            return taken

        return kv_memory.ready_grammars(take, self)


class Scheduler(SimpleNamespace):
    """What of SGLang's scheduler the hooks look at, over a real pool and allocator with `pages` pages of memory."""

    def __init__(self, pages: int, *, waiting: int = 0, chunked: bool = False, evictable: int = 0) -> None:
        driver = Small(10**9)
        kv_memory._driver = lambda device: (driver, lambda: None)
        self.kv = make("int8", kv_lazy=True)
        assert kv_memory._state is not None
        driver.left = pages * kv_memory._state.backing._missing([2])
        allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.bfloat16, "cpu", self.kv, need_sort=False)
        self.told: list[Any] = []
        request = named("waiting", waiting)
        super().__init__(
            token_to_kv_pool_allocator=allocator,
            chunked_req=SimpleNamespace(
                rid="chunked", discard_output_reason=None, prefix_len=128, origin_input_ids=[1] * 200
            )
            if chunked
            else None,
            waiting_queue=[request] if waiting else [],
            chunked_prefill_size=128,
            max_total_num_tokens=TOKENS,
            tree_cache=SimpleNamespace(evictable_size=lambda: evictable, evict=self.evict),
            grammar_manager=Grammars(),
            enable_priority_preemption=False,
            is_hybrid_swa=False,
            get_num_allocatable_reqs=lambda _running, running_batch: 1,
            kv=self.kv,
            told=self.told,
            held=None,
        )

    def evict(self, params: Any) -> None:
        self.told.append(["evict", params.num_tokens])
        self.token_to_kv_pool_allocator.free(self.held)

    def abort_request(self, request: Any) -> None:
        """As SGLang ends requests: all whose name begins with the one given, in both queues."""
        gone = [req for req in self.waiting_queue if req.rid.startswith(request.rid)]
        self.waiting_queue = [req for req in self.waiting_queue if req not in gone]
        gone += [req for req in self.grammar_manager.grammar_queue if req.rid.startswith(request.rid)]
        self.told.extend(["abort", req.rid, request.finished_reason] for req in gone)

    def _add_request_to_queue(self, req: Any) -> None:
        self.waiting_queue.append(req)

    def process_pending_chunked_abort(self) -> None:
        self.told.append(
            ["abort", self._pending_chunked_abort_req.rid, self.chunked_req.discard_output_reason.to_json()]
        )


def running(count: int, *, full: bool = False) -> Any:
    """A batch of so many requests that decode."""
    return SimpleNamespace(is_empty=lambda: not count, reqs=[None] * count, batch_is_full=full)


def prefill(
    pages: int, *, others: int = 0, full: bool = False, first: int = 0, freed: bool = False, **options: Any
) -> list[Any]:
    """What the hook of the prefill does; the last entry says whether SGLang's own function was reached.

    first: pages that another request has before, and gives back where `freed`. others: requests that decode; full: no more may.
    """
    scheduler = Scheduler(pages, **options)
    if first:
        scheduler.held = scheduler.token_to_kv_pool_allocator.alloc(first * PAGE)
    if freed:
        scheduler.token_to_kv_pool_allocator.free(scheduler.held)
    batch = running(others, full=full)
    reached = []
    plan = kv_memory.new_prefill(lambda *_: reached.append(1), scheduler, batch)
    if not reached:
        assert plan.batch_to_run is None and plan.running_batch is batch
    kv_memory._state = None
    return [*scheduler.told, bool(reached)]


def waits(steps: int) -> list[int]:
    """How often memory is looked for in so many steps of others while a request waits, then with one of them gone."""
    scheduler, asked = Scheduler(1, waiting=200), list[int]()
    state = kv_memory._state
    assert state is not None
    ensure = state.backing.ensure
    state.backing.ensure = lambda pages: (asked.append(1), ensure(pages))[1]  # type: ignore[method-assign]
    for _ in range(steps):
        kv_memory.new_prefill(lambda *_: None, scheduler, running(2))
    during = len(asked)
    kv_memory.new_prefill(lambda *_: None, scheduler, running(1))
    kv_memory._state = None
    return [during, len(asked) - during]


def ends_one() -> list[Any]:
    """The request that does not fit, those that are left in both queues, and what was told."""
    scheduler = Scheduler(1)
    scheduler.waiting_queue = [named("job-1", 200), named("job-10", 10), named("other", 10)]
    scheduler.grammar_manager.grammar_queue = [named("job-11", 10)]
    kv_memory.new_prefill(lambda *_: None, scheduler, running(0))
    kv_memory._state = None
    left = [*scheduler.waiting_queue, *scheduler.grammar_manager.grammar_queue]
    return [[req.rid for req in left], [(what, rid) for what, rid, _ in scheduler.told]]


def ready(pages: int) -> list[Any]:
    """A request whose grammar becomes ready: what SGLang's own function finds ready, in the queue, and what was told."""
    scheduler, found = Scheduler(pages), list[Any]()
    scheduler.grammar_manager.ready = [named("json", 200)]

    def sglang(self: Any, _batch: Any) -> None:
        self.grammar_manager.ready = [named("later", 1)]
        found.append([len(self.grammar_manager.get_ready_grammar_requests()), len(self.waiting_queue)])

    kv_memory.new_prefill(sglang, scheduler, running(0))
    scheduler.grammar_manager.ready = [named("later", 1)]
    again = len(scheduler.grammar_manager.get_ready_grammar_requests())
    kv_memory._state = None
    return [found, [(what, rid) for what, rid, _ in scheduler.told], again]


def idle(*, fully: bool) -> list[str]:
    """What happens, in order, when pages are free and the scheduler finds no batch; `fully`: no step is under way either."""
    scheduler, told = Scheduler(8), list[str]()
    assert kv_memory._state is not None
    kv_memory._state._quiesce = lambda: told.append("wait for the device")
    driver = kv_memory._state.backing._driver
    unmap = driver.unmap
    driver.unmap = lambda *place: (told.append("unmap"), unmap(*place))[1]  # type: ignore[method-assign]
    allocator = scheduler.token_to_kv_pool_allocator
    allocator.free(allocator.alloc(4 * PAGE))
    scheduler.is_fully_idle = lambda: fully
    kv_memory.on_idle(lambda _: told.append("sglang"), scheduler)
    kv_memory._state = None
    return [what for what, _ in groupby(told)]


def decode(pages: int, tokens: int, *, prefix: int = 0) -> bool:
    """Whether a decode step that needs so many tokens' pages is said to fit; finished prefixes have `prefix` pages."""
    scheduler = Scheduler(pages, evictable=prefix * PAGE)
    if prefix:
        scheduler.held = scheduler.token_to_kv_pool_allocator.alloc(prefix * PAGE)
    scheduler.new_tokens_required_next_decode = lambda selected: tokens
    answer = kv_memory.check_decode(lambda *_: True, scheduler)
    kv_memory._state = None
    return answer
