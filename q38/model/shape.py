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
                f"model_type is '{model_type or 'absent'}', not qwen4_exp",
                where=where,
                remedy="give a Qwen3.8-Flash-Next (Qwen4-Exp) checkpoint",
            )
        layers = tuple(_layer_type(kind, i, where) for i, kind in enumerate(_layer_types(text, where)))
        number = _Reader(text, where)
        ids = text.get("ple_layer_ids") or []
        mtp = text.get("mtp_num_hidden_layers") or 0
        return cls(
            layer_types=layers,
            **{name: number(name) for name in _REQUIRED},
            ple_conv_kernel_size=number("ple_conv_kernel_size", default=4),
            max_position_embeddings=number("max_position_embeddings", default=32768),
            eos_token_id=_first(text.get("eos_token_id")),
            mtp_layers=int(mtp),
            tied=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
            ngram=_ngram(text, ids, number, len(layers), where) if ids else None,
        )


_REQUIRED = (
    "hidden_size", "vocab_size", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim", "linear_num_key_heads", "linear_num_value_heads",
    "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim", "hc_count", "hc_lowrank", "indexer_n_heads",
    "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
)  # fmt: skip


class _Reader:
    def __init__(self, text: Mapping[str, Any], where: str) -> None:
        self.text, self.where = text, where

    def __call__(self, name: str, default: int | None = None) -> int:
        value = self.text.get(name, default)
        if value is None:
            raise InputError(
                f"text_config.{name} is missing",
                where=self.where,
                remedy="restore config.json of the release",
            )
        if type(value) is not int or value <= 0:
            raise InputError(
                f"text_config.{name} is {value!r}, not a positive integer",
                where=self.where,
                remedy="restore config.json of the release",
            )
        return value


def _first(ids: Any) -> int | None:
    """eos_token_id may be a list; the n-gram hash uses its first."""
    return (ids[0] if ids else None) if isinstance(ids, list) else ids


def _layer_types(text: Mapping[str, Any], where: str) -> list[Any]:
    layers = text.get("layer_types")
    count = text.get("num_hidden_layers")
    if layers is None and isinstance(count, int):
        every = text.get("full_attention_interval", 4)  # transformers' default pattern
        return ["full_attention" if (i + 1) % every == 0 else LINEAR_SPELLING for i in range(count)]
    if not isinstance(layers, list) or not layers:
        raise InputError(
            "text_config.layer_types is missing or empty",
            where=where,
            remedy="restore config.json of the release",
        )
    if count is not None and count != len(layers):
        raise InputError(
            f"{len(layers)} layer_types for num_hidden_layers {count}",
            where=where,
            remedy="restore config.json of the release",
        )
    return layers


def _layer_type(kind: Any, i: int, where: str) -> str:
    if kind == LINEAR_SPELLING:
        return LINEAR_SPELLING
    if kind in ATTENTION_SPELLINGS:
        return "full_attention"
    raise InputError(
        f"layer_types[{i}] is '{kind}'",
        where=where,
        remedy=f"known: {', '.join((LINEAR_SPELLING, *ATTENTION_SPELLINGS))}",
    )


def _ngram(text: Mapping[str, Any], ids: list[Any], number: _Reader, layers: int, where: str) -> NgramShape:
    if not all(type(i) is int and 1 <= i <= layers for i in ids):
        raise InputError(
            f"ple_layer_ids {ids} are not in 1..{layers}",
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
        parts=number("split_ngram_parts", default=512),
        seed=1234 if text.get("seed") is None else int(text["seed"]),
    )
    if shape.embed_dim % shape.heads:
        raise InputError(
            f"ple_embed_dim {shape.embed_dim} is not a multiple of {shape.heads} n-gram heads",
            where=where,
            remedy="restore config.json",
        )
    return shape
