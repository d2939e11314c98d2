"""Bytes that a sequence keeps on the GPU: KV cache per token by format, and GDN state."""

from __future__ import annotations

from q38.base.errors import InputError
from q38.model.shape import ModelShape

RING_SLOTS = 8192  # newest tokens that the tiered format keeps in INT8


# format -> (bits per value, values per scale or 0, bytes per scale)
FORMATS: dict[str, tuple[int, int, int]] = {
    "bf16": (16, 0, 0),
    "fp8": (8, 0, 0),
    "int8": (8, 64, 2),
    "int4": (4, 32, 2),
    "int8ring_int4": (4, 32, 2),
}


def kv_bytes_per_token(shape: ModelShape, kv_format: str, *, context: int, ring: int = RING_SLOTS) -> float:
    """Keys, values and indexer keys of one token over all attention layers, in bytes.

    The tiered format holds INT4 for every token and INT8 for the newest `ring`, so its share
    per token depends on `context`. Indexer keys stay bf16, one per `indexer_compress_ratio` tokens.
    """
    layers = len(shape.attention_layers)
    index = layers * shape.indexer_kv_heads * shape.indexer_head_dim * 2 / shape.indexer_compress_ratio
    size = layers * _layer_bytes(shape, kv_format)
    if kv_format == "int8ring_int4":
        size += layers * _layer_bytes(shape, "int8") * min(ring, context) / context
    return size + index


def _layer_bytes(shape: ModelShape, kv_format: str) -> float:
    if kv_format not in FORMATS:
        raise InputError(f"unknown KV format '{kv_format}'", remedy=f"known: {', '.join(FORMATS)}")
    bits, group, scale = FORMATS[kv_format]
    values = 2 * shape.num_key_value_heads * shape.head_dim  # K and V
    return values * bits / 8 + (values / group * scale if group else 0)


def gdn_state_bytes(shape: ModelShape) -> int:
    """Recurrent (float32) and convolution (bf16) state of one sequence over all GDN layers."""
    heads, key, value = shape.linear_num_value_heads, shape.linear_key_head_dim, shape.linear_value_head_dim
    channels = 2 * shape.linear_num_key_heads * key + heads * value
    per_layer = heads * key * value * 4 + shape.linear_conv_kernel_dim * channels * 2
    return (shape.num_layers - len(shape.attention_layers)) * per_layer
