"""What test_kv_attention.py runs in the process that has imported SGLang, hooks applied; results are JSON."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import kv_checks
import torch
from sglang.srt.layers.attention.qwen_sparse_attn_backend import QwenSparseAttnBackend, QwenSparseAttnMetadata

from q38.kernels import kv_attention as kernels
from q38.sglang_ext import kv_attention, kv_memory
from q38.sglang_ext.host_memory import HostMemory

HEADS, DIM, GROUP = kv_checks.HEADS, kv_checks.DIM, 3
LAYER = SimpleNamespace(layer_id=1, scaling=0.125)


class OnGpu(torch.Tensor):
    """Says that it is on a GPU; Triton's interpreter then runs the kernels on it."""

    is_cuda = True


def backend(name: str | None) -> tuple[Any, Any]:
    """SGLang's own backend over a pool of 150 tokens of layer 1, with three query rows; and a forward batch."""
    kv_memory._driver = lambda _device: (
        HostMemory(),
        lambda: None,
    )  # other checks leave a smaller one behind
    pool, slots = kv_checks.filled(name)
    made = QwenSparseAttnBackend()
    table = torch.zeros(3, 160, dtype=torch.int32)
    table[2, :90], table[0, :60], table[1, :1] = slots[:90].int(), slots[90:].int(), slots[:1].int()
    requests = torch.tensor([2, 0, 1])
    made.token_to_kv_pool, made.req_to_token_pool = pool, SimpleNamespace(req_to_token=table)
    made.forward_metadata = QwenSparseAttnMetadata(
        sequence_lengths=torch.tensor([90, 60, 1], dtype=torch.int32),
        token_to_batch_idx=torch.arange(3),
        token_slot_table=table[requests],
        indexer_metadata=None,
    )
    return made, SimpleNamespace(req_pool_indices=requests)


def selection() -> torch.Tensor:
    """Positions that each row selected, some beyond its length and some missing in the middle."""
    indices = torch.full((3, 40), -1, dtype=torch.int64)
    indices[0] = torch.randperm(90, generator=torch.Generator().manual_seed(4))[:40]
    indices[1, :33] = torch.randperm(60, generator=torch.Generator().manual_seed(5))[:33]
    indices[1, 5], indices[0, 7] = -1, 130
    indices[2, :2] = torch.tensor([0, 1])
    return indices


def queries(rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, HEADS * GROUP, DIM, generator=torch.Generator().manual_seed(6))


def difference(name: str | None, *, in_graph: bool) -> float:
    """Relative difference of the whole hooked method on a "GPU" from itself on a CPU, which is SGLang's reference.

    in_graph: requests come from the metadata, as in a captured step, and the forward batch must not be asked.
    """
    made, batch = backend(name)
    wanted = made._forward_paged_attention(queries(), LAYER, batch, selection()).float()
    if in_graph:
        made.forward_metadata = QwenSparseAttnMetadata(
            sequence_lengths=made.forward_metadata.sequence_lengths,
            token_to_batch_idx=made.forward_metadata.token_to_batch_idx,
            token_slot_table=torch.zeros(3, 1, dtype=torch.int32),
            indexer_metadata=None,
            row_req_pool_indices=batch.req_pool_indices.int(),
            is_cuda_graph=True,
        )
        batch = None
    found = made._forward_paged_attention(queries().as_subclass(OnGpu), LAYER, batch, selection())
    assert found.shape == wanted.shape == (3, HEADS * GROUP * DIM)
    return float((found.as_subclass(torch.Tensor) - wanted).norm() / wanted.norm())


def goes_to_sglang(name: str | None, *, gpu: bool = True, rows: int = 3, heads: int | None = None) -> bool:
    """Whether the hook hands a step on to SGLang's own method, with all of its arguments; else it attends itself."""
    made, batch = backend(name)
    q = queries(rows) if heads is None else torch.zeros(rows, heads, DIM)
    q = q.as_subclass(OnGpu) if gpu else q
    told: list[Any] = []
    indices = selection()
    answer = kv_attention.decode(lambda *args: told.append(args), made, q, LAYER, batch, indices)
    assert not told or all(a is b for a, b in zip(told[0], (made, q, LAYER, batch, indices), strict=True))
    assert bool(told) == (answer is None)
    return bool(told)


def is_fused(name: str | None, *, gpu: bool = True, rows: int = 3, heads: int = HEADS * GROUP) -> bool:
    """Whether a decode step reaches SGLang's fused write and gather, with all of its arguments."""
    made, batch = backend(name)
    layer = SimpleNamespace(layer_id=1, scaling=0.125, tp_q_head_num=heads, head_dim=DIM)
    q = torch.zeros(rows, heads * DIM)
    arguments = (q.as_subclass(OnGpu) if gpu else q, "k", "v", layer, batch, selection())
    told: list[Any] = []
    answer = kv_attention.apart(lambda *args: told.append(args) or "fused", made, *arguments)
    assert not told or all(a is b for a, b in zip(told[0], (made, *arguments), strict=True))
    assert answer == ("fused" if told else None)
    return bool(told)


def cpu_is_left_alone(name: str | None) -> bool:
    """Whether a step on the CPU gives the bits of SGLang's unhooked method and never reaches q38's attention."""
    made, batch = backend(name)
    unhooked = QwenSparseAttnBackend._forward_paged_attention
    while hasattr(unhooked, "__wrapped__"):
        unhooked = unhooked.__wrapped__
    wanted = unhooked(made, queries(), LAYER, batch, selection())
    kept, kernels.decode_attention = kernels.decode_attention, None  # type: ignore[assignment]
    try:
        found = made._forward_paged_attention(queries(), LAYER, batch, selection())
    finally:
        kernels.decode_attention = kept
    return bool(torch.equal(found, wanted))


def blocks_are_expanded() -> bool:
    """Whether indices of blocks are expanded by SGLang before they are read as positions."""
    made, batch = backend("int8")
    asked: list[Any] = []

    def expand(indices: torch.Tensor, metadata: Any) -> torch.Tensor:
        asked.append(metadata is made.forward_metadata)
        return selection()

    plain = kv_attention.attend(made, queries(), LAYER, batch, selection())
    made._expand_block_indices = expand
    found = kv_attention.attend(made, queries(), LAYER, batch, torch.zeros(3, 10, dtype=torch.int32))
    assert plain is not None and found is not None
    return asked == [True] and bool(torch.equal(found, plain))
