"""How each engine reads the width of a module back from a quantization config.

Three readers, three rules:
- AutoRound while tuning: each key of layer_config is a pattern, searched in the module name; the last match wins.
- AutoRound while loading (what transformers uses): exact names first, then the first pattern that is found.
- SGLang 0.5.23: exact names first, then the first pattern that matches whole; a name outside the
  quantized blocks falls to 16 bit with group size -1; one width for all experts of a layer; fused
  modules look their members up only when the model class hands its mapping over.

Sources: auto_round 0.16.1 compressors/layer_config_resolver.py and inference/convert_model.py; sglang
0.5.23 srt/layers/quantization/auto_round.py, AutoRoundConfig.get_layer_config.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

HIGH = 16  # width of a matrix that stays as it is
SGLANG_SPECIAL = frozenset("*+?^$()[]{}|\\")  # a key with one of these is a pattern to SGLang


@dataclass(frozen=True)
class Scheme:
    """How one module is stored. `bits` 16 means unpacked; then the rest says nothing."""

    bits: int
    group_size: int
    sym: bool = True


def resolve_autoround(
    name: str, layer_config: Mapping[str, Mapping[str, Any]], base: Scheme, modules: Collection[str]
) -> Scheme:
    """The scheme AutoRound tunes a module at.

    A pattern beats the exact name, whatever their order, and the last pattern that is found wins.
    AutoRound escapes bare dots itself, so a backslash of the user's own matches a literal backslash.

    Args:
        modules: names of the model's matrices; a key among them is no pattern.
    """
    entry = layer_config.get(name)
    for key, value in layer_config.items():
        if key not in modules and re.search(_standard_regex(key), name):
            entry = value
    return _scheme(entry, base)


def resolve_loader(name: str, config: Mapping[str, Any], modules: Collection[str]) -> Scheme:
    """The scheme AutoRound's loader gives a module.

    Args:
        name: module name.
        config: the quantization_config.
        modules: names of the model's matrices; an extra_config key among them is no pattern.
    """
    extra = config.get("extra_config") or {}
    base = _base(config) if _inside(name, block_names(config)) else Scheme(HIGH, -1)
    if name in extra:
        return _scheme(extra[name], base)
    for key, value in extra.items():
        if key not in modules and re.search(key, name):
            return _scheme(value, base)
    return base


def resolve_sglang(
    name: str,
    config: Mapping[str, Any],
    *,
    kind: Literal["linear", "experts", "lm_head"] = "linear",
    packed: Mapping[str, tuple[str, ...]] | None = None,
) -> Scheme:
    """The scheme SGLang 0.5.23 gives a runtime module.

    Args:
        name: runtime name; "...mlp.experts" with kind "experts" for the experts of a layer.
        config: the quantization_config.
        packed: fused component -> member components ("qkv_proj" -> q_proj, k_proj, v_proj) where the
            model class hands its mapping over; None where it does not, as in 0.5.23.

    Raises:
        ValueError: members of a fused module, or experts of a layer, disagree.
    """
    extra = config.get("extra_config") or {}
    blocks = block_names(config)
    inside = _inside(name, blocks) if blocks else kind != "lm_head"
    if name in extra:
        return _lookup(name, config, quantized=True)
    if kind == "experts":
        found = {_lookup(key, config, quantized=inside) for key in extra if key.startswith(name)}
        if found:
            return _agreed(name, found)
    for fused, members in (packed or {}).items() if extra else ():
        if name.count(fused) == 1:
            found = {_lookup(name.replace(fused, member), config, quantized=inside) for member in members}
            return _agreed(name, found)
    return _lookup(name, config, quantized=inside)


def block_names(config: Mapping[str, Any]) -> list[str]:
    """Prefixes of the quantized blocks, from either spelling and either type."""
    value = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or []
    return value.split(",") if isinstance(value, str) else list(value)


def _lookup(name: str, config: Mapping[str, Any], *, quantized: bool) -> Scheme:
    """SGLang's get_config: exact, then the first whole match, then the base."""
    extra = config.get("extra_config") or {}
    base = _base(config) if quantized else Scheme(HIGH, -1)
    if name in extra:
        return _scheme(extra[name], base)
    for key, value in extra.items():
        if not SGLANG_SPECIAL.isdisjoint(key) and _fullmatch(key, name):
            return _scheme(value, base)
    return base


def _inside(name: str, blocks: list[str]) -> bool:
    return any(name.startswith(block) for block in blocks)


def _base(config: Mapping[str, Any]) -> Scheme:
    return Scheme(config["bits"], config["group_size"], config["sym"])


def _scheme(entry: Mapping[str, Any] | None, base: Scheme) -> Scheme:
    if entry is None:
        return base
    return Scheme(
        entry.get("bits", base.bits), entry.get("group_size", base.group_size), entry.get("sym", base.sym)
    )


def _standard_regex(pattern: str) -> str:
    """AutoRound's to_standard_regex: bare dots escaped, `.*` kept."""
    if not any(token in pattern for token in (".*", "^", "$", "|", "(", ")", "[", "]", "?", "+")):
        return re.escape(pattern)
    return re.sub(r"\.(?!\*)", r"\\.", pattern)


def _fullmatch(pattern: str, name: str) -> bool:
    try:
        return re.fullmatch(pattern, name) is not None
    except re.error:
        return False  # SGLang skips a broken pattern


def _agreed(name: str, schemes: set[Scheme]) -> Scheme:
    if len(schemes) > 1:
        raise ValueError(f"{name} requires one scheme, its parts have {sorted(s.bits for s in schemes)} bits")
    return next(iter(schemes))
