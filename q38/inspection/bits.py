"""Widths of a packed checkpoint: what the tensors hold, and what each engine would read."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from q38.inspection.findings import Findings
from q38.inspection.opened import Opened
from q38.model.names import EXPERT, Group, classify, module_of
from q38.recipe.bits import PACKING, fused_modules
from q38.recipe.resolve import HIGH, Scheme, resolve_loader, resolve_sglang

_REWRITE = "quantize again with q38, which writes exact names"
_NUMBERS = ("bits", "group_size")  # fields of an entry of extra_config
_LOOKED_UP = (Group.NGRAM, Group.EMBED, Group.VISION)
_SAMPLED_EXPERTS = 2  # of each layer, where no pattern tells experts apart


def check_bits(opened: Opened, findings: Findings) -> dict[str, Any]:
    """Check a packed checkpoint. Returns the histogram of its matrices by width."""
    config = opened.quantization
    if not _check_format(config, findings):
        config = {}
    stored = _stored(opened, findings)
    histogram = _histogram(opened, stored)
    _check_fused(stored, findings)
    if config:
        known = {module_of(name) for name in opened.tensors} | set(fused_modules(stored))
        patterns = _check_rules(config, stored, known, findings)
        _check_engines(opened, config, patterns, stored, findings)
    return histogram


def _check_format(config: Mapping[str, Any], findings: Findings) -> bool:
    """Whether quantization_config can be resolved at all."""
    file = {"file": "config.json"}
    if config.get("packing_format") not in (PACKING, None):
        findings.add(
            "bits-packing", f"packing_format is {config['packing_format']}", f"q38 reads {PACKING}", **file
        )
    if config.get("sym") is not True:
        findings.add(
            "bits-asymmetric", f"sym is {config.get('sym', 'absent')}", "quantize symmetrically", **file
        )
    group_size = config.get("group_size")
    if type(group_size) is not int or group_size <= 0 or type(config.get("bits")) is not int:
        findings.add(
            "bits-config",
            f"bits is {config.get('bits', 'absent')}, group_size is {group_size}; both must be positive integers",
            _REWRITE,
            **file,
        )
        return False
    extra = config.get("extra_config") or {}
    if not isinstance(extra, Mapping) or not all(isinstance(v, Mapping) for v in extra.values()):
        findings.add("bits-config", "extra_config is not a mapping from names to entries", _REWRITE, **file)
        return False
    blocks = config.get("block_name_to_quantize") or config.get("to_quant_block_names") or []
    if not isinstance(blocks, str) and not (
        isinstance(blocks, list) and all(isinstance(b, str) for b in blocks)
    ):
        findings.add(
            "bits-config", f"block_name_to_quantize is {blocks!r:.60}, no list of names", _REWRITE, **file
        )
        return False
    wrong = {
        f"{key}.{name}": entry[name]
        for key, entry in extra.items()
        for name in _NUMBERS
        if type(entry.get(name, 0)) is not int
    }
    for name, value in wrong.items():
        findings.add("bits-config", f"extra_config.{name} is {value!r:.60}, not an integer", _REWRITE, **file)
    return "sym" in config and not wrong


def _stored(opened: Opened, findings: Findings) -> dict[str, int]:
    """Matrix -> width by its tensors; 16 where it is not packed."""
    widths: dict[str, int] = {}
    for name, info in opened.tensors.items():
        if name.endswith(".qweight"):
            module = name.removesuffix(".qweight")
            width = opened.widths[module]
            if not width:
                findings.add(
                    "bits-width",
                    f"qweight {list(info.shape)} and its qzeros and scales fit no width",
                    "download the file again",
                    file=info.file.name,
                    tensor=name,
                )
            widths[module] = width or HIGH
        elif name.endswith(".weight") and len(info.shape) == 2 and classify(name) not in _LOOKED_UP:
            widths.setdefault(name.removesuffix(".weight"), HIGH)
    return widths


def _histogram(opened: Opened, stored: Mapping[str, int]) -> dict[str, Any]:
    """Width -> matrices, parameters and bytes (words, zero points and scales together)."""
    rows: dict[int, dict[str, int]] = defaultdict(lambda: {"matrices": 0, "parameters": 0, "bytes": 0})
    for module, width in stored.items():
        row = rows[width]
        row["matrices"] += 1
        suffixes = ("weight",) if width == HIGH else ("qweight", "qzeros", "scales")
        parts = [t for s in suffixes if (t := opened.tensors.get(f"{module}.{s}"))]
        row["bytes"] += sum(t.nbytes for t in parts)
        if parts:
            row["parameters"] += parts[0].numel if width == HIGH else parts[0].numel * 32 // width
    return {str(width): rows[width] for width in sorted(rows)}


def _check_fused(stored: Mapping[str, int], findings: Findings) -> None:
    for fused, members in fused_modules(
        {m: w for m, w in stored.items() if not m.startswith("mtp.")}
    ).items():
        widths = {member: stored[member] for member in members if member in stored}
        if len(set(widths.values())) > 1:
            detail = ", ".join(f"{member.rpartition('.')[2]} {width}" for member, width in widths.items())
            findings.add(
                "fused-mixed",
                f"members differ in bits ({detail})",
                "give its members one width",
                tensor=fused,
            )
    layers: dict[str, set[int]] = defaultdict(set)
    for module, width in stored.items():
        if match := EXPERT.match(module):
            layers[f"{match['layer']}.mlp.experts"].add(width)
    for layer, found in layers.items():
        if len(found) > 1:
            findings.add(
                "experts-mixed",
                f"experts have {sorted(found)} bits",
                "give the layer one width",
                tensor=layer,
            )


def _check_rules(
    config: Mapping[str, Any], stored: Mapping[str, int], known: set[str], findings: Findings
) -> dict[str, Any]:
    """Find keys that do nothing. Returns the keys that work as patterns, in order."""
    extra = config.get("extra_config") or {}
    blob = "\n".join(known)
    patterns: dict[str, Any] = {}
    for key, entry in extra.items():
        if key in known:
            continue
        plain = re.fullmatch(r"[\w.]+", key) is not None
        if plain and key not in blob:
            findings.add("rule-unmatched", f"'{key}' is no module", "remove the key", file="config.json")
            continue
        try:
            re.compile(key)
        except re.error as error:
            findings.add(
                "rule-broken", f"'{key}' is not a pattern ({error})", "correct the key", file="config.json"
            )
            continue
        patterns[key] = entry
    free = [name for name in _sampled(stored, patterns) if name not in extra]
    named = [name for name in _sampled(stored, patterns) if name in extra]
    taken: set[str] = set()
    for key in patterns:
        matched = [name for name in free if re.search(key, name)]
        won = [name for name in matched if name not in taken]
        taken.update(won)
        if won:
            continue
        if matched or any(re.search(key, name) for name in named):
            findings.add(
                "rule-shadowed",
                f"'{key}' never decides: exact keys or earlier patterns come first wherever it matches",
                "remove the key",
                file="config.json",
            )
        elif not any(re.search(key, name) for name in known):
            findings.add("rule-unmatched", f"'{key}' matches no module", "remove the key", file="config.json")
    return patterns


def _sampled(stored: Mapping[str, int], patterns: Iterable[str]) -> list[str]:
    """Modules to try patterns on: all, or two experts of each layer where no pattern tells experts apart."""
    if any(re.search(r"experts\W*\.\W*[\d(\[]", key) for key in patterns):
        return list(stored)
    return [name for name in stored if not (m := EXPERT.match(name)) or int(m["expert"]) < _SAMPLED_EXPERTS]


def _check_engines(
    opened: Opened,
    config: Mapping[str, Any],
    patterns: Mapping[str, Any],
    stored: Mapping[str, int],
    findings: Findings,
) -> None:
    extra = config.get("extra_config") or {}
    short = {**config, "extra_config": patterns}
    checked = set(_sampled(stored, patterns)) | (stored.keys() & extra.keys())
    for name in (n for n in stored if n in checked):
        if classify(name) is Group.ROUTER:
            continue
        loader = resolve_loader(name, config if name in extra else short, stored)
        _expect(opened, "AutoRound", name, stored[name], loader, findings)
        if not EXPERT.match(name):
            kind: Any = "lm_head" if classify(name) is Group.LM_HEAD else "linear"
            _expect(opened, "SGLang", name, stored[name], resolve_sglang(name, config, kind=kind), findings)
    layers = {f"{m['layer']}.mlp.experts": m[0] for name in stored if (m := EXPERT.match(name))}
    for layer, expert in layers.items():
        try:
            found = resolve_sglang(layer, config, kind="experts")
        except ValueError as error:
            findings.add(
                "bits-config", f"SGLang refuses it: {error}", _REWRITE, file="config.json", tensor=layer
            )
            continue
        _expect(opened, "SGLang", layer, stored[expert], found, findings, like=expert)
    for fused, members in fused_modules(stored).items():
        widths = {stored[m] for m in members if m in stored}
        if len(widths) == 1:
            found = resolve_sglang(fused, config)
            _expect(opened, "SGLang", fused, widths.pop(), found, findings, like=members[0])


def _expect(
    opened: Opened,
    engine: str,
    name: str,
    width: int,
    found: Scheme,
    findings: Findings,
    *,
    like: str | None = None,
) -> None:
    group_size = _stored_group_size(opened, like or name) if width < HIGH else found.group_size
    if found.bits == width and found.group_size == group_size:
        return
    findings.add(
        "bits-config",
        f"{engine} would read {_scheme(found.bits, found.group_size)}, stored are {_scheme(width, group_size)}",
        _REWRITE,
        file="config.json",
        tensor=name,
    )


def _stored_group_size(opened: Opened, module: str) -> int:
    words, scales = opened.tensors.get(f"{module}.qweight"), opened.tensors.get(f"{module}.scales")
    width = opened.widths.get(module)
    if words is None or scales is None or not width or not scales.shape[0]:
        return 0
    return words.shape[0] * 32 // width // scales.shape[0]


def _scheme(bits: int, group_size: int) -> str:
    return "16 bits" if bits >= HIGH else f"{bits} bits in groups of {group_size}"
