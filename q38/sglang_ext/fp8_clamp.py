"""Keys and values are clamped to what fp8 holds before SGLang casts them.

The cast of CUDA gives NaN beyond 448 where torch's CPU cast saturates; one NaN in the cache ends a request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import KV_POOL

_FP8 = torch.float8_e4m3fn


def hooks() -> list[Hook]:
    """See hooks.apply. `fused_kv_attention` is called by the hook of kv_attention.py, which has that method."""
    return [Hook(KV_POOL + ".set_kv_buffer", "around", set_kv_buffer)]


def set_kv_buffer(
    original: Callable[..., None],
    self: Any,
    layer: Any,
    loc_info: Any,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    k_scale: float | None = None,
    v_scale: float | None = None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """set_kv_buffer with keys and values that fit. The limit is that of the stored value, after the scale."""
    if self.dtype == _FP8 and cache_k.dtype != self.dtype and not self.is_quantized_kv_cache:
        cache_k, cache_v = _fitting(cache_k, k_scale), _fitting(cache_v, v_scale)
    original(self, layer, loc_info, cache_k, cache_v, k_scale, v_scale, *args, **kwargs)


def fused_kv_attention(
    original: Callable[..., Any], self: Any, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any
) -> Any:
    """The decode path of compute capability 10 and 12 writes the cache itself, by a plain cast."""
    if k is not None and v is not None:
        stored = self.token_to_kv_pool.get_key_buffer(layer.layer_id).dtype
        if stored == _FP8 and k.dtype != _FP8:
            k, v = _fitting(k, None), _fitting(v, None)
    return original(self, q, k, v, layer, *args, **kwargs)


def _fitting(values: torch.Tensor, scale: float | None) -> torch.Tensor:
    limit = torch.finfo(_FP8).max * (1.0 if scale is None else float(scale))
    return values.clamp(-limit, limit)
