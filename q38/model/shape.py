"""The shape of a Qwen4-Exp model, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from q38.base.errors import InputError

# One layer kind, three spellings: the release, transformers 5.16, transformers 5.24.
ATTENTION_SPELLINGS = ("full_attention", "qwen_sparse_attention", "indexed_attention")
LINEAR_SPELLING = "linear_attention"


@dataclass(frozen=True)
class NgramShape:
    """The n-gram table (PLE): `heads` lookups a token, `dim` values each."""

    layer_ids: tuple[int, ...]  # zero-based (the config counts from one)
    embed_dim: int
    ngram_size: int
    heads_per_ngram: int
    vocab_base: int
    divisor: int
    parts: int
    seed: int

    @property
    def heads(self) -> int:
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def dim(self) -> int:
        return self.embed_dim // self.heads


@dataclass(frozen=True)
class ModelShape:
    """Sizes that the rest of q38 derives everything from. Field names follow config.json."""

    layer_types: tuple[str, ...]  # "linear_attention" or "full_attention", one per layer
    hidden_size: int
    vocab_size: int
    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_conv_kernel_dim: int
    hc_count: int
    hc_lowrank: int
    ple_conv_kernel_size: int
    indexer_n_heads: int
    indexer_kv_heads: int
    indexer_head_dim: int
    indexer_budget: int
    indexer_compress_ratio: int
    max_position_embeddings: int
    eos_token_id: int | None
    mtp_layers: int
    tied: bool
    ngram: NgramShape | None

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full_attention")

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: str = "config.json") -> ModelShape:
        """Read a nested (release) or flat (text-only) config.

        Raises:
            InputError: not a Qwen4-Exp config, a field is missing or not a positive integer, or a
                layer type is unknown.
        """
        text = config.get("text_config", config)
        model_type = str(config.get("model_type", ""))
        if not isinstance(text, Mapping) or not model_type.startswith("qwen4_exp"):
            raise InputError(
                f"model_type is '{model_type}', not qwen4_exp"
                if model_type
                else "is no config.json of a model: it has no model_type",
                where=where,
                remedy="give a Qwen3.8-Flash-Next (Qwen4-Exp) checkpoint",
            )
        layers = tuple(_layer_type(kind, i, where) for i, kind in enumerate(_layer_types(text, where)))
        number = SizeReader(text, where)
        ids = text.get("ple_layer_ids") or []
        mtp = number("mtp_num_hidden_layers") if text.get("mtp_num_hidden_layers") else 0
        if (len(layers) + mtp) * number("num_experts") > _MAX_EXPERTS:
            raise InputError(
                f"{len(layers)} layers of {number('num_experts')} experts are more than q38 counts",
                where=where,
                remedy=_RESTORE,
            )
        return cls(
            layer_types=layers,
            **{name: number(name) for name in _REQUIRED},
            ple_conv_kernel_size=number("ple_conv_kernel_size", default=4),
            max_position_embeddings=number("max_position_embeddings", default=32768),
            eos_token_id=_eos(text.get("eos_token_id"), where),
            mtp_layers=mtp,
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            ngram=_ngram(text, ids, number, len(layers), where) if ids else None,
        )


_REQUIRED = (
    "hidden_size", "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "hc_count", "hc_lowrank", "indexer_n_heads",
    "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip


_RESTORE = "restore config.json of the release"
# Bounds that no real model comes near: a damaged config must be refused, not counted through.
_MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000
_MAX_EXPERTS = 2**21  # of all layers together
_MAX_PARTS = 2**16
_MAX_HEADS = 2**12


class SizeReader:
    """Reads sizes from one section of config.json: positive integers, or an InputError that names the key."""

    def __init__(self, values: Mapping[str, Any], where: str, section: str = "text_config") -> None:
        self.values, self.where, self.section = values, where, section

    def __call__(self, name: str, default: int | None = None, most: int = _MAX_SIZE) -> int:
        value = self.values.get(name, default)
        if value is None:
            raise InputError(
                f"{self.section}.{name} is missing",
                where=self.where,
                remedy=_RESTORE,
            )
        if type(value) is not int or not 0 < value <= most:
            raise InputError(
                f"{self.section}.{name} is {_short(value)}, not a positive integer that a size can be",
                where=self.where,
                remedy=_RESTORE,
            )
        return value


def _eos(ids: Any, where: str) -> int | None:
    """eos_token_id may be a list; the n-gram hash uses its first."""
    first = (ids[0] if ids else None) if isinstance(ids, list) else ids
    if first is not None and (type(first) is not int or not 0 <= first <= _MAX_SIZE):
        raise InputError(
            f"text_config.eos_token_id is {_short(ids)}, not a token id", where=where, remedy=_RESTORE
        )
    return first


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."


def _layer_types(text: Mapping[str, Any], where: str) -> list[Any]:
    layers = text.get("layer_types")
    count = text.get("num_hidden_layers")
    if layers is None and count is not None:
        number = SizeReader(text, where)
        every = number("full_attention_interval", default=4)  # transformers' default pattern
        count = number("num_hidden_layers", most=MAX_LAYERS)
        return ["full_attention" if (i + 1) % every == 0 else LINEAR_SPELLING for i in range(count)]
    if not isinstance(layers, list) or not layers:
        raise InputError(
            "text_config.layer_types is missing or empty",
            where=where,
            remedy=_RESTORE,
        )
    if count is not None and count != len(layers):
        raise InputError(
            f"{len(layers)} layer_types for num_hidden_layers {_short(count)}",
            where=where,
            remedy=_RESTORE,
        )
    return layers


def _layer_type(kind: Any, i: int, where: str) -> str:
    if kind == LINEAR_SPELLING:
        return LINEAR_SPELLING
    if kind in ATTENTION_SPELLINGS:
        return "full_attention"
    raise InputError(
        f"layer_types[{i}] is '{_short(kind) if not isinstance(kind, str) else kind}'",
        where=where,
        remedy=f"known: {', '.join((LINEAR_SPELLING, *ATTENTION_SPELLINGS))}",
    )


def _seed(value: Any, where: str) -> int:
    if value is not None and (type(value) is not int or not 0 <= value < 2**63):
        raise InputError(f"text_config.seed is {_short(value)}, not a seed", where=where, remedy=_RESTORE)
    return 1234 if value is None else value


def _ngram(
    text: Mapping[str, Any], ids: list[Any], number: SizeReader, layers: int, where: str
) -> NgramShape:
    if not isinstance(ids, list) or not all(type(i) is int and 1 <= i <= layers for i in ids):
        raise InputError(
            f"ple_layer_ids {_short(ids)} are not in 1..{layers}",
            where=where,
            remedy="they count from one; restore config.json",
        )
    shape = NgramShape(
        layer_ids=tuple(i - 1 for i in sorted(set(ids))),
        embed_dim=number("ple_embed_dim", default=number("hidden_size")),
        ngram_size=number("ngram_size", default=3),
        heads_per_ngram=number("heads_per_ngram", default=8),
        vocab_base=number("ngram_vocab_size_base", default=20_000_000),
        divisor=number("make_ngram_vocab_size_divisible_by", default=128),
        parts=number("split_ngram_parts", default=512, most=_MAX_PARTS),
        seed=_seed(text.get("seed"), where),
    )
    if shape.heads * len(shape.layer_ids) > _MAX_HEADS:
        raise InputError(
            f"{shape.heads} n-gram heads on {len(shape.layer_ids)} layers are more than q38 counts",
            where=where,
            remedy=_RESTORE,
        )
    if shape.embed_dim % shape.heads:
        raise InputError(
            f"ple_embed_dim {shape.embed_dim} is not a multiple of {shape.heads} n-gram heads",
            where=where,
            remedy="restore config.json",
        )
    return shape
