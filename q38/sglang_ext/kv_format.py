"""The KV cache of the attention layers in one of q38's formats, as a KV quantization method of SGLang.

SGLang asks the method for buffers and hands it what is to be written. It hands buffers on to whoever reads the
cache; what it gets to hand on is a `PackedRows`, no tensor, so that only the gathers of kv_reads.py can read it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from sglang.srt.layers.quantization.fp4_kv_cache_quant_method import KVCacheQuantMethodBase

from q38.base.errors import InputError
from q38.base.units import format_bytes
from q38.kvcache.layout import SIDES, TIERED, KvLayout, Side
from q38.kvcache.pool import KvPool, Memory
from q38.sglang_ext import kv_memory
from q38.sglang_ext.hooks import Hook, exit_on_refusal
from q38.sglang_ext.options import ExtensionOptions, given
from q38.sglang_ext.targets import KV_CONFIGURATOR, KV_POOL, POOL_SIZES

logger = logging.getLogger(__name__)
# Methods of SGLang's pool that take its buffers for plain keys and values.
_RAW = (
    "get_cpu_copy",
    "load_cpu_copy",
    "move_kv_cache",
    "get_raw_kv_buffer",
    "get_contiguous_buf_infos",
    "set_kv_buffer_prefix_valid",
)


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(KV_CONFIGURATOR + "._build_mha_quant_method", "around", build_method),
        Hook(POOL_SIZES + "._compute_cell_size", "around", cell_size),
        *(Hook(f"{KV_POOL}.{name}", "around", refuse_raw) for name in _RAW),
    ]


class PackedRows:
    """Keys or values of one layer of a quantized pool, in the place of their buffer. Not a tensor.

    Attributes:
        pool, layer, side: what `KvPool.gather` wants.
        shape: that of the rows, [slots, heads, dim]. dtype: what they are gathered to.
    """

    ndim = 3

    def __init__(self, pool: KvPool, layer: int, side: Side, dtype: torch.dtype) -> None:
        self.pool, self.layer, self.side, self.dtype = pool, layer, side, dtype
        self.shape = torch.Size((pool.slots, pool.layout.heads, pool.layout.dim))
        self.device = pool.device

    def gather(self, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """See KvPool.gather."""
        return self.pool.gather(self.layer, self.side, slots, out)

    def __getattr__(self, name: str) -> NoReturn:
        raise _unread(f"something asks for .{name}")

    def __getitem__(self, _index: Any) -> NoReturn:
        raise _unread("something indexes it")

    @classmethod
    def __torch_function__(cls, function: Any, *_args: Any, **_kwargs: Any) -> NoReturn:
        raise _unread(f"torch.{getattr(function, '__name__', function)} is called on it")


def _unread(how: str) -> InputError:
    return InputError(
        f"a quantized KV cache is read by a path that does not undo the rounding ({how})",
        where="--kv",
        remedy="use --kv bf16 or fp8 with this combination of options",
    )


class StoredKv(KVCacheQuantMethodBase):  # type: ignore[misc]
    """SGLang's view of one KvPool."""

    name = "q38"

    def __init__(self, layout: KvLayout, options: ExtensionOptions, page_size: int) -> None:
        self.layout, self.options, self.page_size = layout, options, page_size
        self.dtype = torch.bfloat16
        self._at: dict[int, tuple[int, Side]] = {}  # address of a payload -> where it belongs
        self.pool: KvPool | None = None
        self.memory: Memory | None = None  # keeps the addresses for as long as the pool's tensors view them

    def needs_plain_kv_dequant_read(self) -> bool:
        """SGLang hands its buffers to `dequantize_kv_tensor` before anyone sees them."""
        return True

    def create_buffers(
        self, size: int, head_num: int, head_dim: int, layer_num: int, device: str
    ) -> dict[str, Any]:
        """Make the pool of `size` slots."""
        layout, found = self.layout, (layer_num, head_num, head_dim)
        with exit_on_refusal():
            if found != (layout.layers, layout.heads, layout.dim):
                raise InputError(
                    f"a pool of {found} layers, heads and channels, the model has {layout.layers}, {layout.heads}, {layout.dim}",
                    where="--kv",
                    remedy="serve on one GPU, without speculation",
                )
            self.memory = kv_memory.open_memory(
                layout, size - self.page_size, self.page_size, torch.device(device), self.options
            )
        self.pool = pool = KvPool(layout, size, device=device, memory=self.memory)
        pool.clear_first(self.page_size)
        rows = {side: [layer[side] for layer in pool.rows] for side in SIDES}
        self._at = {
            layer.payload.data_ptr(): (i, side) for side in SIDES for i, layer in enumerate(rows[side])
        }
        empty = torch.empty(0, dtype=torch.float16, device=device)
        logger.info(
            "q38: KV cache in %s, %d bytes a token, %d tokens, ring of %d (%s)",
            layout.name,
            layout.bytes_per_slot,
            size - self.page_size,
            layout.ring,
            format_bytes(layout.ring_bytes),
        )
        buffers: dict[str, Any] = {"store_dtype": torch.uint8}
        for side in SIDES:
            buffers[f"{side}_buffer"] = [r.payload for r in rows[side]]
            buffers[f"{side}_scale_buffer"] = [empty if r.scales is None else r.scales for r in rows[side]]
        return buffers

    def quantize_and_store(
        self,
        k_buffer: torch.Tensor,
        v_buffer: torch.Tensor,
        k_scale_buffer: torch.Tensor | None,
        v_scale_buffer: torch.Tensor | None,
        loc: torch.Tensor,
        cache_k: torch.Tensor,
        cache_v: torch.Tensor,
        k_scale: Any = None,
        v_scale: Any = None,
        **_native: Any,
    ) -> None:
        """Round and scatter the keys and values of a step, [tokens, heads, dim] each."""
        if not (k_scale in (None, 1.0) and v_scale in (None, 1.0)):
            raise InputError("scales of the checkpoint's own", where="--kv", remedy="use --kv fp8")
        assert self.pool is not None
        layer, _ = self._at[k_buffer.data_ptr()]
        shape = (-1, self.layout.heads, self.layout.dim)
        if self.options.kv_zeroed:
            cache_k, cache_v = torch.zeros_like(cache_k), torch.zeros_like(cache_v)
        self.pool.write(layer, loc, cache_k.reshape(shape), cache_v.reshape(shape))

    def dequantize_kv_tensor(
        self,
        fp4_tensor: torch.Tensor,
        scales: torch.Tensor,
        layer_id: int,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """A PackedRows for a buffer; the names are SGLang's."""
        assert self.pool is not None
        layer, side = self._at[fp4_tensor.data_ptr()]
        return PackedRows(self.pool, layer, side, dtype or self.dtype)

    def dequantize_prev_kv(self, *_args: Any, **_kwargs: Any) -> NoReturn:
        """For attention backends that want a workspace; none of them is used here."""
        raise _unread("an attention backend wants a workspace")

    def compute_cell_size(self, head_num: int, head_dim: int, num_layers: int, kv_size: int) -> int:
        """Bytes of one token."""
        return self.layout.bytes_per_slot


def build_method(original: Callable[..., Any], self: Any, *, num_layers: int) -> Any:
    """q38's method where `q38 serve --kv` asked for one of its formats."""
    options = given()
    if options is None or options.kv is None or self.is_draft_worker:
        return original(self, num_layers=num_layers)
    with exit_on_refusal():
        _refuse_combinations(self)
        layout = _layout(self, num_layers, options)
        if 0 < layout.ring < (chunk := _chunk()):
            raise InputError(
                f"prefill steps of {chunk} tokens and a ring of {layout.ring}",
                where="--kv " + TIERED,
                remedy=f"pass --chunk {layout.ring} or less",
            )
        return StoredKv(layout, options, self.pool_page_size)


def cell_size(original: Callable[..., int], self: Any, kvc: Any, num_layers: int) -> int:
    """Bytes a token that SGLang sizes its pool by: what the pool takes at once."""
    plain = original(self, kvc, num_layers)
    options = given()
    if options is None or options.kv is None or kvc.is_draft_worker or not num_layers:
        return plain
    layout = _layout(kvc, num_layers, options)
    stored = 2 * layout.layers * layout.heads * layout.dim * kvc.kv_cache_dtype.itemsize
    # Memory that is mapped when pages are handed out is not taken here.
    return int(plain - stored + (0 if options.kv_lazy else layout.bytes_per_slot))


def refuse_raw(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """A method of SGLang's pool that would copy packed rows as if they were keys and values."""
    if isinstance(self.quant_method, StoredKv):
        raise _unread(f"{original.__name__} copies the buffers")
    return original(self, *args, **kwargs)


def _layout(kvc: Any, num_layers: int, options: ExtensionOptions) -> KvLayout:
    assert options.kv is not None
    config = kvc.model_config
    heads = config.get_num_kv_heads(1)
    return KvLayout(
        options.kv, num_layers, heads, config.head_dim, options.kv_ring if options.kv == TIERED else 0
    )


def _chunk() -> int:
    from sglang.srt.runtime_context import get_schedule

    return int(get_schedule().chunked_prefill_size or 0)


def _refuse_combinations(kvc: Any) -> None:
    """What of SGLang reads or moves the cache by paths that know nothing of these formats."""
    args = kvc.server_args
    conflicts = {
        "--enable-hierarchical-cache": bool(args.enable_hierarchical_cache),
        "--disaggregation-mode": args.disaggregation_mode != "null",
        "--enable-memory-saver": bool(args.enable_memory_saver),
        "--speculative-algorithm": args.speculative_algorithm is not None,
        "--tp": args.tp_size != 1,
        "--kv-cache-dtype": kvc.kv_cache_dtype != torch.bfloat16,
    }
    for option, conflict in conflicts.items():
        if conflict:
            raise InputError(
                f"contradicts --kv {given().kv}: SGLang reads, moves or sizes the cache by itself there",  # type: ignore[union-attr]
                where=option,
                remedy="leave it out, or use --kv bf16 or fp8",
            )
