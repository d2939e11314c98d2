"""Which matrix gets how many bits, and the quantization config that every engine reads back alike.

The rules by which the engines read it are in resolve.py. They disagree on patterns, so extra_config
holds exact names only, each with every field, SGLang's fused runtime names included.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Literal

from q38.base.errors import InputError
from q38.checkpoint.packing import WORD, codes_per_step
from q38.model.expected import Expected, mtp_tensors, text_tensors, unfuse
from q38.model.names import LAYERS, PACKABLE, Group, classify
from q38.model.shape import ModelShape
from q38.recipe.resolve import HIGH, Scheme, resolve_loader, resolve_sglang
from q38.recipe.schema import Recipe

INT8 = 8
PACKING = "auto_round:auto_gptq"
MTP_LAYERS = "mtp.layers"
ROUTED = (Group.EXPERTS, Group.MTP_EXPERTS)

# SGLang's fused runtime module -> the checkpoint modules it is made of.
FUSED = {
    "linear_attn.in_proj_qkvz": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
    "linear_attn.in_proj_ba": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.shared_expert.gate_up_proj": ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj"),
}


def plan_bits(config: Mapping[str, Any], recipe: Recipe, *, requantized: bool = True) -> dict[str, int]:
    """Module name -> width of every matrix of the text model (and of MTP where the recipe keeps it).

    The embedding and the n-gram table, which are looked up and not multiplied, are left out.

    Args:
        config: config.json of the source.
        requantized: the finished checkpoint; False for what `q38 quantize` writes, before requant-int8.

    A matrix of a requant_int8 group that the packed layout cannot express stays in 16 bit (of the hyper-connections
    all but the down mixes, whose inputs fill whole groups).

    Raises:
        InputError: the recipe lowers a group that holds a matrix the packed layout cannot express, or names
            a requant_int8 group of which no matrix can be packed.
    """
    q = recipe.quantize
    int8 = recipe.requant_int8.groups if requantized else []
    unpacked: dict[Group, Expected | None] = dict.fromkeys(
        int8
    )  # group -> one of its matrices, until one can be packed
    plan: dict[str, int] = {}
    for tensor, group in _matrices(ModelShape.from_config(config), mtp=q.mtp == "keep"):
        width = q.bits.get(group, HIGH) if group in PACKABLE else HIGH
        module = tensor.name.removesuffix(".weight")
        if width < HIGH:
            if not _is_packable(tensor, width, q.group_size):
                raise _unpackable(tensor, width, q.group_size, where=f"quantize.bits.{group}")
        elif group in int8:
            if _is_packable(tensor, INT8, q.group_size):
                width = INT8
                unpacked.pop(group, None)
            elif group in unpacked:
                unpacked[group] = unpacked[group] or tensor
        plan[module] = width
    for tensor in filter(None, unpacked.values()):
        raise _unpackable(tensor, INT8, q.group_size, where="requant_int8.groups")
    return plan


def quantization_config(bits: Mapping[str, int], recipe: Recipe) -> dict[str, Any]:
    """The quantization_config of config.json, without the facts of the run that made it.

    Raises:
        InputError: the experts stay in 16 bit, or the members of a fused module differ.
    """
    return {
        "quant_method": "auto-round",
        "packing_format": PACKING,
        "bits": base_bits(bits),
        "group_size": recipe.quantize.group_size,
        "sym": True,
        "data_type": "int",
        "block_name_to_quantize": ",".join(_blocks(bits)),
        "extra_config": extra_config(bits, recipe),
    }


def base_bits(bits: Mapping[str, int]) -> int:
    """The width that needs no entry in extra_config: the commonest one of the routed experts.

    Raises:
        InputError: the experts stay in 16 bit.
    """
    widths = Counter(
        width for name, width in bits.items() if width < HIGH and classify(name) is Group.EXPERTS
    )
    if not widths:
        raise InputError(
            "the recipe leaves the experts in 16 bit",
            where="quantize.bits",
            remedy="set quantize.bits.experts to 2, 3, 4 or 8",
        )
    return widths.most_common(1)[0][0]


def extra_config(bits: Mapping[str, int], recipe: Recipe) -> dict[str, dict[str, Any]]:
    """Exact module name -> its entry, for every module that the base does not already describe.

    Raises:
        InputError: the experts stay in 16 bit, or the members of a fused module differ.
    """
    base, blocks = base_bits(bits), tuple(_blocks(bits))
    entries: dict[str, dict[str, Any]] = {}
    for name, width in bits.items():
        default = base if name.startswith(blocks) else HIGH
        group = classify(name)
        # Routers are a bare parameter in both engines; experts are too many to list without need.
        if group is not Group.ROUTER and not (group in ROUTED and width == default):
            entries[name] = _entry(width, recipe)
    for fused, members in fused_modules(bits).items():
        widths = {bits[member] for member in members}
        if len(widths) > 1:
            detail = ", ".join(f"{member.rpartition('.')[2]} {bits[member]}" for member in members)
            raise InputError(
                f"is one matrix in the server, but its members differ in bits ({detail})",
                where=fused,
                remedy="give its members one width",
            )
        entries[fused] = _entry(widths.pop(), recipe)
    return entries


def fused_modules(bits: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    """SGLang's fused runtime modules of this plan -> their members."""
    found: dict[str, tuple[str, ...]] = {}
    firsts = tuple(f".{members[0]}" for members in FUSED.values())
    for name in bits:
        if not name.endswith(firsts):
            continue
        for fused, members in FUSED.items():
            if name.endswith("." + members[0]):
                prefix = name.removesuffix(members[0])
                found[prefix + fused] = tuple(prefix + member for member in members)
    return found


def check_resolution(config: Mapping[str, Any], bits: Mapping[str, int]) -> None:
    """Read every planned module back by both engines' rules.

    Args:
        config: a quantization_config.
        bits: what the checkpoint really holds.

    Raises:
        InputError: the first module that an engine would read at another width or group size.
    """
    extra = config.get("extra_config") or {}
    patterns = {**config, "extra_config": _live_patterns(extra, bits)}
    layers: dict[str, int] = {}
    for name, width in bits.items():
        group = classify(name)
        if group is Group.ROUTER:
            continue
        loaded = resolve_loader(name, config if name in extra else patterns, bits)
        _expect("AutoRound", name, width, config, loaded)
        if group in ROUTED:
            layers.setdefault(name.partition(".experts.")[0] + ".experts", width)
        else:
            kind: Literal["linear", "lm_head"] = "lm_head" if group is Group.LM_HEAD else "linear"
            _expect("SGLang", name, width, config, resolve_sglang(name, config, kind=kind))
    for layer, width in layers.items():
        _expect("SGLang", layer, width, config, resolve_sglang(layer, config, kind="experts"))
    for fused, members in fused_modules(bits).items():
        _expect("SGLang", fused, bits[members[0]], config, resolve_sglang(fused, config))


def _matrices(shape: ModelShape, *, mtp: bool) -> Iterator[tuple[Expected, Group]]:
    source = chain(text_tensors(shape), mtp_tensors(shape) if mtp else ())
    for tensor in chain.from_iterable(map(unfuse, source)):
        group = classify(tensor.name)
        if len(tensor.shape) == 2 and tensor.name.endswith(".weight") and group is not Group.EMBED:
            yield tensor, group


def _is_packable(tensor: Expected, width: int, group_size: int) -> bool:
    n, k = tensor.shape
    # AutoRound packs a matrix only where both sides are multiples of 32, which also fills whole words.
    return group_size > 0 and not (k % group_size or k % codes_per_step(width) or n % WORD or k % WORD)


def _unpackable(tensor: Expected, width: int, group_size: int, *, where: str) -> InputError:
    module = tensor.name.removesuffix(".weight")
    return InputError(
        f"{module} {list(tensor.shape)} cannot be packed at {width} bits in groups of {group_size}",
        where=where,
        remedy="remove the entry, or choose another group size",
    )


def _entry(width: int, recipe: Recipe) -> dict[str, Any]:
    data_type = "int" if width < HIGH else "fp"
    return {"bits": width, "group_size": recipe.quantize.group_size, "sym": True, "data_type": data_type}


def _blocks(bits: Mapping[str, int]) -> list[str]:
    mtp = any(width < HIGH for name, width in bits.items() if name.startswith(MTP_LAYERS + "."))
    return [LAYERS, MTP_LAYERS] if mtp else [LAYERS]


def _live_patterns(extra: Mapping[str, Any], bits: Mapping[str, int]) -> dict[str, Any]:
    """The keys of extra_config that are a pattern to AutoRound's loader and may find a module.

    A plain name that is no module (a fused runtime name) is one, and finds nothing unless some name
    contains it: one scan over all names, where the loader's own rule would search every name.
    """
    names = "\n".join(bits)
    return {
        key: value
        for key, value in extra.items()
        if key not in bits and (key in names or not re.fullmatch(r"[\w.]+", key))
    }


def _expect(engine: str, name: str, width: int, config: Mapping[str, Any], found: Scheme) -> None:
    wanted = Scheme(width, config["group_size"])
    if found.bits != width or (width < HIGH and found != wanted):
        raise InputError(
            f"{engine} would read it at {found.bits} bits in groups of {found.group_size},"
            f" it is stored at {width} bits in groups of {wanted.group_size}",
            where=name,
            remedy="let q38 write extra_config again",
        )
