"""Tensor names of Qwen4-Exp and the parameter groups that recipes speak of."""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

LAYERS = "model.language_model.layers"  # prefix of the transformer blocks in the release layout


class Group(StrEnum):
    """Parameter groups. Recipes give bits per group; inspect and plan count by group."""

    NGRAM = "ngram"  # the PLE table and its scale
    NGRAM_META = "ngram_meta"  # multipliers, head sizes, head offsets (int64)
    PLE = "ple"  # key and value projections, conv and norms of the PLE layer
    MTP_EXPERTS = "mtp_experts"
    MTP = "mtp"
    VISION = "vision"
    HYPER_CONNECTION = "hyper_connection"
    ROUTER = "router"
    SHARED_EXPERT_GATE = "shared_expert_gate"
    SHARED_EXPERT = "shared_expert"
    EXPERTS = "experts"
    GDN_STATE = "gdn_state"  # A_log, dt_bias, conv1d
    GDN_GATES = "gdn_gates"  # in_proj_a, in_proj_b
    GDN_IN = "gdn_in"  # in_proj_qkv, in_proj_z
    GDN_OUT = "gdn_out"
    INDEXER = "indexer"
    ATTENTION = "attention"  # q, k, v, o
    NORM = "norm"
    EMBED = "embed"
    LM_HEAD = "lm_head"
    OTHER = "other"


# First match wins; the order puts the special before the general.
_RULES: tuple[tuple[str, Group], ...] = (
    (r"\.ngram_embedding\.(shard_\d+\.weight|weight|weight_scale)$", Group.NGRAM),
    (r"\.ple_embedding\.\w+$", Group.NGRAM_META),
    (r"^mtp\..*\.mlp\.experts\.", Group.MTP_EXPERTS),
    (r"^mtp\.", Group.MTP),
    (r"^model\.visual\.", Group.VISION),
    (r"hyper_connection", Group.HYPER_CONNECTION),
    (r"\.ple\.", Group.PLE),
    (r"\.mlp\.gate\.", Group.ROUTER),
    (r"\.shared_expert_gate\.", Group.SHARED_EXPERT_GATE),
    (r"\.shared_expert\.", Group.SHARED_EXPERT),
    (r"\.mlp\.experts\.", Group.EXPERTS),
    (r"\.linear_attn\.(A_log|dt_bias|conv1d)", Group.GDN_STATE),
    (r"\.linear_attn\.in_proj_[ab]\.", Group.GDN_GATES),
    (r"\.linear_attn\.in_proj_(qkv|z)\.", Group.GDN_IN),
    (r"\.linear_attn\.out_proj\.", Group.GDN_OUT),
    (r"\.self_attn\.indexer\.", Group.INDEXER),
    (r"\.self_attn\.[qkvo]_proj\.", Group.ATTENTION),
    (r"norm", Group.NORM),
    (r"embed_tokens", Group.EMBED),
    (r"^lm_head(\.|$)", Group.LM_HEAD),
)
_NUMBER = re.compile(r"(?<=[._])\d+")  # an index, not the 1 of conv1d
_COMPILED = tuple((re.compile(pattern), group) for pattern, group in _RULES)

# Groups whose rounding error does not average out (routing, recurrence, lookups, residual mixing).
KEEP_HIGH = frozenset(
    {
        Group.NGRAM_META, Group.PLE, Group.HYPER_CONNECTION, Group.ROUTER, Group.SHARED_EXPERT_GATE, Group.GDN_STATE,
        Group.GDN_GATES, Group.INDEXER, Group.NORM, Group.EMBED, Group.VISION, Group.MTP,
    }
)  # fmt: skip

# Groups made of nn.Linear matrices, which can be packed at a lower width.
PACKABLE = frozenset(
    {
        Group.EXPERTS, Group.MTP_EXPERTS, Group.SHARED_EXPERT, Group.GDN_IN, Group.GDN_OUT, Group.ATTENTION, Group.LM_HEAD,
        Group.INDEXER, Group.PLE, Group.HYPER_CONNECTION, Group.GDN_GATES,
    }
)  # fmt: skip

PACKED_SUFFIXES = (".qweight", ".qzeros", ".scales")
_PARAMETERS = frozenset({"weight_scale_inv", "weight_scale", "weight", "bias", "qweight", "qzeros", "scales"})
NGRAM_SHARD = re.compile(r"^(?P<prefix>.*\.ngram_embedding)\.shard_(?P<n>\d+)\.weight$")
NGRAM_SCALE = re.compile(r"\.ngram_embedding\.weight_scale$")
EXPERT = re.compile(
    r"^(?P<layer>.*\.layers\.(?P<n>\d+))\.mlp\.experts\.(?P<expert>\d+)\.(?P<proj>gate_proj|up_proj|down_proj)(?P<suffix>\..*)?$"
)
FUSED_EXPERTS = re.compile(
    r"^(?P<layer>.*\.layers\.(?P<n>\d+))\.mlp\.experts\.(?P<proj>gate_up_proj|down_proj)$"
)
_ONE_EXPERT = re.compile(
    r"model\.language_model\.layers\.\d+\.mlp\.experts\.\d+\.(?:gate|up|down)_proj(?:\.(?:q?weight|qzeros|scales|weight_scale_inv))?$"
)
LAYER = re.compile(r"\.layers\.(?P<n>\d+)\.")


def classify(name: str) -> Group:
    """The group of a tensor or module name (source, packed or per-expert spelling)."""
    if _ONE_EXPERT.match(name):  # nearly all tensors of an FP8 or packed checkpoint, so first
        return Group.EXPERTS
    return _classify_pattern(_NUMBER.sub("0", name))


@lru_cache(maxsize=4096)
def _classify_pattern(name: str) -> Group:
    """`classify` for a name with its numbers blanked: hundreds of patterns instead of 200,000 names."""
    probe = name if name.endswith((".weight", ".bias")) or "." not in name else name + "."
    for pattern, group in _COMPILED:
        if pattern.search(name) or pattern.search(probe):
            return group
    return Group.OTHER


def layer_of(name: str) -> int | None:
    """Zero-based index of the block a tensor belongs to; None outside the main model's blocks."""
    match = LAYER.search(name)
    return int(match["n"]) if match and not name.startswith("mtp.") and ".visual." not in name else None


def module_of(name: str) -> str:
    """Tensor name -> module name: the last component dropped where it names a parameter."""
    module, _, last = name.rpartition(".")
    return module if last in _PARAMETERS else name
