"""One layer's attention in a decode step: SGLang's path over a gather beside the attention from rows where they lie.

    PYTHONPATH=. python benchmarks/kv_attention.py                 # needs a GPU, and SGLang for its part of the path
    TRITON_INTERPRET=1 PYTHONPATH=. python benchmarks/kv_attention.py --device cpu    # a rehearsal at a small size

SGLang's path: counts and prefix sum of the selection, q38's slots and two gathers into a bf16 scratch (of bf16 and
fp8 rows SGLang's own gather), then flash_attn_varlen_func where it is installed, else SGLang's own Triton kernel for packed decode; torch's FlashAttention beside it. Both paths get the
same queries, selections and pools. Calls of 12 layers, each with its pool and its random slots, are captured
into one graph, with as many selections that the rows of a replay do not fit into the L2 cache; times are per layer.
Bytes are those of codes and scales of the selected rows (and of the ring where it has them).
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from q38.kernels.kv_attention import AttentionConfig, StoredRows, decode_attention, split
from q38.kernels.kv_attention_reference import attention_reference
from q38.kernels.kv_select import selected_slots
from q38.kernels.timing import copy_rate, graph_time
from q38.kvcache.layout import SIDES, TIERED, KvLayout
from q38.kvcache.pool import KvPool

HEADS, QUERIES, DIM, RING = 2, 24, 256, 8192
PLAIN = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
SCALE = DIM**-0.5
COLD = 2**28  # bytes: several times the L2 cache of any GPU
CONFIGS = (
    AttentionConfig(), AttentionConfig(splits=17), AttentionConfig(splits=11), AttentionConfig(splits=5),
    AttentionConfig(warps=4), AttentionConfig(block=32, warps=4), AttentionConfig(block=32, warps=4, splits=33),
)  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is measured; the rehearsal is small."""

    device: str
    context: int = 262_144
    topk: int = 2051
    layers: int = 12
    rows: tuple[int, ...] = (1, 4, 16)

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device == "cuda" else torch.float16  # the interpreter knows no bf16


@dataclass
class Step:
    """Query rows of one layer and what they selected."""

    q: torch.Tensor
    table: torch.Tensor
    requests: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor


Attention = Callable[[Step, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--formats", default=f"bf16,fp8,int8,{TIERED},int4")
    parser.add_argument("--default-only", action="store_true", help="leave the other split counts out")
    arguments = parser.parse_args()
    sizes = Sizes(arguments.device)
    if arguments.device == "cpu":
        sizes = Sizes("cpu", context=600, topk=131, layers=2, rows=(1, 2))
    theirs, name = sglangs_attention(sizes)
    rate = copy_rate() if sizes.device == "cuda" else float("nan")
    say(f"device copy {rate / 1e9:.0f} GB/s; SGLang's part of the path: {name}")
    for kind in arguments.formats.split(","):
        pools = [filled(kind, sizes) for _ in range(sizes.layers)]
        for rows in sizes.rows:
            configs = CONFIGS[:1] if arguments.default_only or sizes.device == "cpu" else CONFIGS
            measure(pools, rows, sizes, theirs, rate, configs)
        del pools


def measure(
    pools: list[Pool], rows: int, sizes: Sizes, theirs: Attention | None, rate: float, configs: Sequence[AttentionConfig]
) -> None:  # fmt: skip
    """Print the times of one format at one number of rows."""
    kind = pools[0].name
    first = step(rows, sizes, 0)
    nbytes = sum(read_bytes(pools[0], first, row) for row in range(rows))
    sets = -(-COLD // (nbytes * len(pools))) if sizes.device == "cuda" else 1
    work = [(pool, step(rows, sizes, seed)) for seed in range(sets) for pool in pools]
    exact = attention_reference(
        first.q,
        pools[0].keys,
        pools[0].values,
        first.table,
        first.requests,
        first.indices,
        first.lengths,
        SCALE,
    )

    def error(out: torch.Tensor) -> str:
        return f"error {float((out.double() - exact).norm() / exact.norm()):.1e}"

    say(f"{kind}, {rows} rows: {nbytes / 1e6:.2f} MB a layer, {len(work)} layers a graph")
    today = Today(rows, sizes, theirs)
    before = None
    for part, call in today.parts().items():
        seconds = timed([lambda p=pool, s=of, call=call: call(p, s) for pool, of in work], sizes)
        say(f"  today, {part}: {seconds * 1e6:.2f} us")
        before = seconds if part == "whole" else before
    if before is not None:
        say(f"  today, {error(today.whole(pools[0], first))}")
    for config in configs:
        each, splits = split(sizes.topk, config)
        seconds = timed(
            [lambda p=pool, s=of, config=config: packed(p, s, config) for pool, of in work], sizes
        )
        ratio = "" if before is None else f", {before / seconds:.1f} times as fast"
        say(
            f"  packed, blocks of {config.block} x {each}, {config.warps} warps, {splits} splits: {seconds * 1e6:.2f} us"
            f"{ratio}, {nbytes / seconds / 1e9:.0f} GB/s, {nbytes / seconds / rate:.2f} of copy, "
            f"{error(packed(pools[0], first, config))}"
        )


@dataclass(frozen=True)
class Pool:
    """Keys and values of one layer; `packed` is None for plain rows."""

    name: str
    keys: StoredRows
    values: StoredRows
    packed: KvPool | None = None


class Today:
    """SGLang's path for one number of rows, buffers as in a captured step."""

    def __init__(self, rows: int, sizes: Sizes, attention: Attention | None) -> None:
        self.rows, self.topk, self.attention = rows, sizes.topk, attention
        whole = torch.zeros(2, rows * sizes.topk, HEADS, DIM, dtype=sizes.dtype, device=sizes.device)
        self.k, self.v = whole[0], whole[1]
        self.counts = torch.zeros(rows, dtype=torch.int32, device=sizes.device)
        self.starts = torch.arange(rows + 1, dtype=torch.int32, device=sizes.device) * sizes.topk

    def parts(self) -> dict[str, Callable[[Pool, Step], object]]:
        """The gather alone, and the whole where SGLang is there."""
        torchs = {"gather and torch's FlashAttention": self.torchs}
        return {
            "slots and gather": self.gather,
            **torchs,
            **({"whole": self.whole} if self.attention else {}),
        }

    def gather(self, pool: Pool, of: Step) -> None:
        if pool.packed is None:
            sparse = importlib.import_module("sglang.srt.layers.attention.qsa.sparse_attn")
            sparse.qwen_sparse_kv_extraction_compact_triton(
                pool.keys.payload, pool.values.payload, of.table, of.requests, of.indices, of.lengths, self.starts,
                self.k, self.v, self.rows, self.topk,
            )  # fmt: skip
            return
        slots = selected_slots(
            of.table, of.requests, of.indices, of.lengths, self.starts, self.rows, self.topk
        )
        pool.packed.gather(0, "k", slots, self.k)
        pool.packed.gather(0, "v", slots, self.v)

    def torchs(self, pool: Pool, of: Step) -> torch.Tensor:
        """FlashAttention 2 as torch has it, which takes rows of equal length only: here all have the same."""
        self.gather(pool, of)
        k, v = (of_all.view(self.rows, self.topk, HEADS, DIM).transpose(1, 2) for of_all in (self.k, self.v))
        backend = SDPBackend.FLASH_ATTENTION if of.q.is_cuda else SDPBackend.MATH
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(of.q[:, :, None], k, v, scale=SCALE, enable_gqa=True)[:, :, 0]

    def whole(self, pool: Pool, of: Step) -> torch.Tensor:
        assert self.attention is not None
        sparse = importlib.import_module("sglang.srt.layers.attention.qsa.sparse_attn")
        sparse.qwen_sparse_fa2_cu_seqlens_triton(
            of.lengths, of.indices, self.counts, self.starts, self.rows, self.topk
        )
        self.gather(pool, of)
        return self.attention(of, self.k, self.v, self.counts, self.starts)


def sglangs_attention(sizes: Sizes) -> tuple[Attention | None, str]:
    """What SGLang calls after the gather on this machine, and its name."""
    if sizes.device == "cpu":
        importlib.import_module("q38.sglang_ext.cpu.prepare").prepare()
    try:
        sparse: Any = importlib.import_module("sglang.srt.layers.attention.qsa.sparse_attn")
    except ImportError as error:
        return None, f"not measured, {error}"
    if sizes.device == "cpu":
        sparse._get_best_config = lambda _rows: (32, 4, 2)  # it asks for the GPU's name
    ones = torch.arange(17, dtype=torch.int32, device=sizes.device)
    try:
        flash: Any = importlib.import_module("flash_attn").flash_attn_varlen_func
    except ImportError:
        # All positions are valid here, so each row's own are 0, 1, 2, ...; SGLang would make them once a layer.
        every = torch.arange(sizes.topk, dtype=torch.int32, device=sizes.device).repeat(max(sizes.rows), 1)

        def packed_decode(of: Step, k: Any, v: Any, counts: torch.Tensor, starts: torch.Tensor) -> Any:
            rows = len(of.q)
            return sparse.sparse_gqa_packed_decode_triton(
                of.q, k, v, every[:rows], ones[: rows + 1], starts, counts, SCALE
            )

        return packed_decode, "sparse_gqa_packed_decode_triton (no flash_attn here)"

    def varlen(of: Step, k: Any, v: Any, _counts: torch.Tensor, starts: torch.Tensor) -> Any:
        return flash(
            q=of.q, k=k, v=v, cu_seqlens_q=ones[: len(of.q) + 1], cu_seqlens_k=starts, max_seqlen_q=1,
            max_seqlen_k=sizes.topk, softmax_scale=SCALE, causal=True,
        )  # fmt: skip

    return varlen, "flash_attn_varlen_func"


def packed(pool: Pool, of: Step, config: AttentionConfig) -> torch.Tensor:
    return decode_attention(
        of.q, pool.keys, pool.values, of.table, of.requests, of.indices, of.lengths, SCALE, config=config
    )


def filled(kind: str, sizes: Sizes) -> Pool:
    """A pool of random codes or numbers; the newest slots own the ring."""
    if kind in PLAIN:
        rows = torch.randn(2, sizes.context, HEADS, DIM, device=sizes.device, dtype=sizes.dtype).to(
            PLAIN[kind]
        )
        return Pool(kind, StoredRows(rows[0], None, None), StoredRows(rows[1], None, None))
    layout = KvLayout(kind, 1, HEADS, DIM, RING if kind == TIERED else 0)
    pool = KvPool(layout, sizes.context, device=sizes.device)
    for side in SIDES:
        rows = pool.rows[0][side]
        assert rows.scales is not None
        for payload, scales in ((rows.payload, rows.scales), *([rows.tiers[:2]] if rows.tiers else [])):
            payload.view(torch.uint8).random_(0, 256)
            scales.uniform_(0.005, 0.02)
        if rows.tiers is not None:
            newest = torch.arange(max(0, sizes.context - layout.ring), sizes.context, device=sizes.device)
            rows.tiers.owner[newest % layout.ring] = newest.int()
    k, v = (pool.rows[0][side] for side in SIDES)
    return Pool(
        kind,
        StoredRows(k.payload, k.scales, layout.rows, k.tiers),
        StoredRows(v.payload, v.scales, layout.rows, v.tiers),
        pool,
    )


def step(rows: int, sizes: Sizes, seed: int) -> Step:
    """Every row a full context of its own selection; slots in random order."""
    generator = torch.Generator(sizes.device).manual_seed(seed)

    def order() -> torch.Tensor:
        return torch.randperm(sizes.context, generator=generator, device=sizes.device).int()

    q = torch.randn(rows, QUERIES, DIM, generator=generator, device=sizes.device).to(sizes.dtype)
    indices = torch.stack([order()[: sizes.topk] for _ in range(rows)]).contiguous()
    lengths = torch.full((rows,), sizes.context, dtype=torch.int32, device=sizes.device)
    return Step(q, order()[None], torch.zeros_like(lengths), indices, lengths)


def read_bytes(pool: Pool, of: Step, row: int) -> int:
    """Bytes of keys and values that one query row selected."""
    k = pool.keys
    slots = of.table[0, of.indices[row].long()].long()
    hot = 0
    row_bytes = k.payload[0].nbytes + (0 if k.scales is None else k.scales[0].nbytes)
    ring_bytes = row_bytes
    if k.ring is not None:
        hot = int((k.ring[2][slots % k.ring[2].numel()] == slots).sum())
        ring_bytes = k.ring[0][0].nbytes + k.ring[1][0].nbytes
    return 2 * (hot * ring_bytes + (len(slots) - hot) * row_bytes)


def timed(calls: list[Callable[[], object]], sizes: Sizes) -> float:
    """Seconds of a call."""
    if sizes.device == "cuda":
        return graph_time(calls)
    begun = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begun) / len(calls)


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
