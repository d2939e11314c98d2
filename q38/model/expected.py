"""Every tensor a Qwen4-Exp checkpoint must hold, derived from config.json alone.

Three layouts: "bf16" (the release: experts fused in 3-D), "fp8" (the FP8 release: one matrix per
expert with 128 x 128 block scales, an fp8 n-gram table) and "quantized" (packed AutoRound words).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from q38.model.names import LAYERS
from q38.model.ngram import table_rows
from q38.model.shape import MAX_LAYERS, ModelShape, SizeReader

Layout = Literal["bf16", "fp8", "quantized"]
TEXT = "model.language_model"
FP8_BLOCK = 128
# Small vectors that a release may keep in float32 without being wrong.
FLOAT_VECTORS = (".A_log", ".dt_bias", ".linear_attn.norm.weight")


@dataclass(frozen=True, slots=True)
class Expected:
    """One tensor. `dtypes` lists what is acceptable, the usual one first."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = ("BF16",)


def source_tensors(config: Mapping[str, Any], layout: Layout = "bf16") -> Iterator[Expected]:
    """All tensors of a source checkpoint: text, n-gram table, MTP and vision where the config has them."""
    shape = ModelShape.from_config(config)
    yield from text_tensors(shape, layout)
    yield from ngram_tensors(shape, layout)
    yield from mtp_tensors(shape, layout)
    if isinstance(vision := config.get("vision_config"), Mapping):
        yield from vision_tensors(vision)


def text_tensors(shape: ModelShape, layout: Layout = "bf16") -> Iterator[Expected]:
    """The main model without the n-gram table."""
    yield _weight(f"{TEXT}.embed_tokens", shape.vocab_size, shape.hidden_size)
    if not shape.tied:
        yield _weight("lm_head", shape.vocab_size, shape.hidden_size)
    for i, kind in enumerate(shape.layer_types):
        yield from _layer(f"{LAYERS}.{i}", shape, kind, layout)
        if shape.ngram and i in shape.ngram.layer_ids:
            yield from _ple(f"{LAYERS}.{i}.ple", shape)
    yield from _hyper_connection(f"{TEXT}.hyper_connection_mixer", shape, inject=False)


def ngram_tensors(shape: ModelShape, layout: Layout = "bf16") -> Iterator[Expected]:
    """The n-gram table in its shards, its constants and (fp8) its scale."""
    if shape.ngram is None:
        return
    ngram = shape.ngram
    for index, layer in enumerate(ngram.layer_ids):
        prefix = f"{LAYERS}.{layer}.ple.ple_embedding"
        rows, parts = table_rows(ngram, index), ngram.parts
        for part in range(parts):
            size = rows // parts + (part < rows % parts)
            yield Expected(
                f"{prefix}.ngram_embedding.shard_{part}.weight",
                (size, ngram.dim),
                ("F8_E4M3",) if layout == "fp8" else ("BF16",),
            )
        if layout == "fp8":
            yield Expected(f"{prefix}.ngram_embedding.weight_scale", (1,), ("BF16", "F32"))
        yield from ngram_constants(shape, index)


def ngram_constants(shape: ModelShape, index: int = 0) -> Iterator[Expected]:
    """The int64 constants of one n-gram table; packed checkpoints keep them."""
    assert shape.ngram is not None
    prefix = f"{LAYERS}.{shape.ngram.layer_ids[index]}.ple.ple_embedding"
    yield Expected(f"{prefix}.layer_multipliers", (shape.ngram.ngram_size,), ("I64",))
    yield Expected(f"{prefix}.ngram_heads_vocab_sizes", (shape.ngram.heads,), ("I64",))
    yield Expected(f"{prefix}.ngram_heads_offsets", (shape.ngram.heads,), ("I64",))


def mtp_tensors(shape: ModelShape, layout: Layout = "bf16") -> Iterator[Expected]:
    """The multi-token-prediction head: attention layers of the main shape, no n-gram table."""
    if not shape.mtp_layers:
        return
    h = shape.hidden_size
    yield _weight("mtp.fc_embedding", h, h)
    yield _weight("mtp.fc_hidden", h, h)
    yield _weight("mtp.pre_fc_norm_embedding", h)
    yield _weight("mtp.pre_fc_norm_hidden", shape.hc_count * h)
    for i in range(shape.mtp_layers):
        yield from _layer(f"mtp.layers.{i}", shape, "full_attention", layout)
    yield from _hyper_connection("mtp.hyper_connection_mixer", shape, inject=False)


def vision_tensors(vision: Mapping[str, Any]) -> Iterator[Expected]:
    """The vision tower (names and shapes of transformers' Qwen4ExpVisionModel).

    Raises:
        InputError: a size is missing or no positive integer.
    """
    number = SizeReader(vision, "config.json", "vision_config")
    h, mid = number("hidden_size"), number("intermediate_size")
    merged = h * number("spatial_merge_size", 2) ** 2
    patch = number("patch_size", 16)
    conv = (h, number("in_channels", 3), number("temporal_patch_size", 2), patch, patch)
    root = "model.visual"
    yield from _biased(f"{root}.patch_embed.proj", conv)
    yield _weight(f"{root}.pos_embed", number("num_position_embeddings", 2304), h)
    for i in range(number("depth", most=MAX_LAYERS)):
        block = f"{root}.blocks.{i}"
        for name, size in (
            ("attn.qkv", (3 * h, h)),
            ("attn.proj", (h, h)),
            ("mlp.linear_fc1", (mid, h)),
            ("mlp.linear_fc2", (h, mid)),
        ):
            yield from _biased(f"{block}.{name}", size)
        yield from _biased(f"{block}.norm1", (h,))
        yield from _biased(f"{block}.norm2", (h,))
    yield from _biased(f"{root}.merger.norm", (h,))
    yield from _biased(f"{root}.merger.linear_fc1", (merged, merged))
    yield from _biased(f"{root}.merger.linear_fc2", (number("out_hidden_size"), merged))


def packed_tensors(
    name: str, out_features: int, in_features: int, bits: int, group_size: int
) -> Iterator[Expected]:
    """The three tensors of one packed matrix (auto_round:auto_gptq): words along K, zeros along N."""
    groups = in_features // group_size if group_size > 0 else 1
    yield Expected(f"{name}.qweight", (in_features * bits // 32, out_features), ("I32",))
    yield Expected(f"{name}.qzeros", (groups, out_features * bits // 32), ("I32",))
    yield Expected(f"{name}.scales", (groups, out_features), ("F16",))


def quantized_tensors(
    config: Mapping[str, Any], bits: Mapping[str, int], group_size: int, *, mtp: bool, vision: bool
) -> Iterator[Expected]:
    """A packed checkpoint: matrices of `bits` (module name -> width; absent or 16 = unpacked), no n-gram table.

    Experts are one matrix each, whatever the source's layout was.
    """
    shape = ModelShape.from_config(config)
    sources = list(text_tensors(shape))
    if shape.ngram:
        for index in range(len(shape.ngram.layer_ids)):
            sources += ngram_constants(shape, index)
    if mtp:
        sources += mtp_tensors(shape)
    for tensor in (t for source in sources for t in unfuse(source)):
        module = tensor.name.removesuffix(".weight")
        width = bits.get(module, 16)
        if width < 16:
            out_features, in_features = tensor.shape
            yield from packed_tensors(module, out_features, in_features, width, group_size)
        else:
            yield tensor
    if vision and isinstance(config.get("vision_config"), Mapping):
        yield from vision_tensors(config["vision_config"])


def unfuse(tensor: Expected) -> Iterator[Expected]:
    """A fused expert tensor as one matrix per expert; any other tensor as it is."""
    prefix, _, last = tensor.name.rpartition(".")
    if not prefix.endswith(".mlp.experts") or last not in ("gate_up_proj", "down_proj"):
        yield tensor
        return
    experts, rows, columns = tensor.shape
    for e in range(experts):
        if last == "gate_up_proj":
            yield _weight(f"{prefix}.{e}.gate_proj", rows // 2, columns)
            yield _weight(f"{prefix}.{e}.up_proj", rows // 2, columns)
        else:
            yield _weight(f"{prefix}.{e}.down_proj", rows, columns)


def _weight(module: str, *shape: int) -> Expected:
    return Expected(f"{module}.weight", shape)


def _biased(module: str, shape: tuple[int, ...]) -> Iterator[Expected]:
    yield Expected(f"{module}.weight", shape)
    yield Expected(f"{module}.bias", shape[:1])


def _float_vector(name: str, size: int) -> Expected:
    return Expected(name, (size,), ("BF16", "F32"))


def _layer(prefix: str, shape: ModelShape, kind: str, layout: Layout) -> Iterator[Expected]:
    yield from _hyper_connection(f"{prefix}.attn_hyper_connection", shape)
    yield from _hyper_connection(f"{prefix}.mlp_hyper_connection", shape)
    yield from (
        _attention(f"{prefix}.self_attn", shape)
        if kind == "full_attention"
        else _gdn(f"{prefix}.linear_attn", shape)
    )
    yield from _moe(f"{prefix}.mlp", shape, layout)


def _hyper_connection(prefix: str, shape: ModelShape, *, inject: bool = True) -> Iterator[Expected]:
    wide = shape.hc_count * shape.hidden_size
    yield _weight(f"{prefix}.hc_norm", wide)
    yield _weight(f"{prefix}.input_mix_weight_down", shape.hc_lowrank, wide)
    yield _weight(f"{prefix}.input_mix_weight_up", wide, shape.hc_lowrank)
    if inject:
        yield _weight(f"{prefix}.block_inject_weight", shape.hc_count, wide)


def _gdn(prefix: str, shape: ModelShape) -> Iterator[Expected]:
    h, heads = shape.hidden_size, shape.linear_num_value_heads
    values = heads * shape.linear_value_head_dim
    qkv = 2 * shape.linear_num_key_heads * shape.linear_key_head_dim + values
    yield _float_vector(f"{prefix}.A_log", heads)
    yield _float_vector(f"{prefix}.dt_bias", heads)
    yield Expected(f"{prefix}.conv1d.weight", (qkv, 1, shape.linear_conv_kernel_dim))
    yield _weight(f"{prefix}.in_proj_qkv", qkv, h)
    yield _weight(f"{prefix}.in_proj_z", values, h)
    yield _weight(f"{prefix}.in_proj_a", heads, h)
    yield _weight(f"{prefix}.in_proj_b", heads, h)
    yield _float_vector(f"{prefix}.norm.weight", shape.linear_value_head_dim)
    yield _weight(f"{prefix}.out_proj", h, values)


def _attention(prefix: str, shape: ModelShape) -> Iterator[Expected]:
    h, d = shape.hidden_size, shape.head_dim
    q, kv = shape.num_attention_heads * d, shape.num_key_value_heads * d
    index = (shape.indexer_n_heads + shape.indexer_kv_heads) * shape.indexer_head_dim
    yield _weight(f"{prefix}.q_proj", 2 * q, h)  # query and output gate
    yield _weight(f"{prefix}.k_proj", kv, h)
    yield _weight(f"{prefix}.v_proj", kv, h)
    yield _weight(f"{prefix}.o_proj", h, q)
    yield _weight(f"{prefix}.q_norm", d)
    yield _weight(f"{prefix}.k_norm", d)
    yield _weight(f"{prefix}.indexer.index_qk_proj", index, h)
    yield _weight(f"{prefix}.indexer.q_layernorm", shape.indexer_head_dim)
    yield _weight(f"{prefix}.indexer.k_layernorm", shape.indexer_head_dim)


def _moe(prefix: str, shape: ModelShape, layout: Layout) -> Iterator[Expected]:
    h, mid, shared, experts = (
        shape.hidden_size,
        shape.moe_intermediate_size,
        shape.shared_expert_intermediate_size,
        shape.num_experts,
    )
    yield _weight(f"{prefix}.gate", experts, h)
    yield _weight(f"{prefix}.shared_expert_gate", 1, h)
    yield _weight(f"{prefix}.shared_expert.gate_proj", shared, h)
    yield _weight(f"{prefix}.shared_expert.up_proj", shared, h)
    yield _weight(f"{prefix}.shared_expert.down_proj", h, shared)
    if layout != "fp8":
        yield Expected(f"{prefix}.experts.gate_up_proj", (experts, 2 * mid, h))
        yield Expected(f"{prefix}.experts.down_proj", (experts, h, mid))
        return
    for e in range(experts):
        for name, rows, columns in (("gate_proj", mid, h), ("up_proj", mid, h), ("down_proj", h, mid)):
            yield Expected(f"{prefix}.experts.{e}.{name}.weight", (rows, columns), ("F8_E4M3",))
            blocks = (-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
            yield Expected(f"{prefix}.experts.{e}.{name}.weight_scale_inv", blocks, ("BF16", "F32"))


def _ple(prefix: str, shape: ModelShape) -> Iterator[Expected]:
    assert shape.ngram is not None
    wide = shape.hc_count * shape.hidden_size
    yield _weight(f"{prefix}.key_proj", wide, shape.ngram.embed_dim)
    yield _weight(f"{prefix}.value_proj", shape.hidden_size, shape.ngram.embed_dim)
    yield Expected(f"{prefix}.conv1d.weight", (wide, 1, shape.ple_conv_kernel_size))
    for norm in ("norm_key", "norm_query", "norm_conv"):
        yield _weight(f"{prefix}.{norm}", wide)
