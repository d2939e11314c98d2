"""Which layout the tensors have, and whether every tensor is there in the right shape and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from q38.checkpoint.header import TensorInfo
from q38.inspection.findings import Findings
from q38.inspection.opened import Opened
from q38.model.expected import (
    Expected,
    Layout,
    mtp_tensors,
    ngram_constants,
    packed_tensors,
    text_tensors,
    unfuse,
    vision_tensors,
)
from q38.model.names import EXPERT, FUSED_EXPERTS, NGRAM_SCALE, NGRAM_SHARD

_INCOMPLETE = "download the checkpoint again, or correct config.json"
_METHOD: Mapping[str, Layout] = {"fp8": "fp8", "auto-round": "quantized"}


def detect_layout(opened: Opened, findings: Findings) -> Layout | None:
    """The layout that the tensors themselves show; None if they fit none."""
    layout = _by_tensors(opened.tensors)
    method = opened.quantization.get("quant_method")
    announced = "bf16" if method is None else _METHOD.get(str(method))
    if layout is None:
        findings.add(
            "layout-unknown",
            f"no routed experts in a known form (quant_method {method or 'absent'})",
            "give a bf16 or FP8 release, or a checkpoint packed as auto_round:auto_gptq",
        )
    elif layout != announced:
        findings.add(
            "layout-config",
            f"the tensors are {layout}, quantization_config says {method or 'nothing'}",
            "restore config.json of this checkpoint",
            file="config.json",
        )
    return layout


def experts_form(opened: Opened, findings: Findings) -> str:
    """ "fused" (one 3-D tensor per layer), "per expert", "mixed" or "none"."""
    experts = [name for name in opened.tensors if ".experts." in name and not name.startswith("mtp.")]
    fused = {m["n"] for name in experts if (m := FUSED_EXPERTS.match(name))}
    single = {m["n"] for name in experts if (m := EXPERT.match(name))}
    if fused and single:
        findings.add(
            "experts-mixed-layout",
            f"layers {_some(fused)} have fused experts, layers {_some(single)} one matrix per expert",
            "download the checkpoint again",
        )
        return "mixed"
    return "fused" if fused else "per expert" if single else "none"


def check_tensors(opened: Opened, layout: Layout, experts: str, findings: Findings) -> None:
    """Every expected tensor against its header entry; what is left over is unexpected."""
    left = dict(opened.tensors)
    for expected in _expected(opened, layout, experts):
        info = left.pop(expected.name, None)
        if info is None:
            findings.add(
                "scale-missing" if expected.name.endswith("_scale_inv") else "tensor-missing",
                f"{list(expected.shape)} {expected.dtypes[0]} is missing",
                _INCOMPLETE,
                tensor=expected.name,
            )
        else:
            _compare(expected, info, findings)
    for name, info in left.items():
        if _is_checked_elsewhere(name):
            continue
        if info.dtype == "F8_E4M3" and f"{name}_scale_inv" not in opened.tensors:
            findings.add(
                "scale-missing",
                f"is fp8 and has no {name}_scale_inv",
                _INCOMPLETE,
                file=info.file.name,
                tensor=name,
            )
        else:
            findings.add(
                "tensor-unexpected",
                f"{info.dtype} {list(info.shape)} is not part of this model",
                "remove it, or correct config.json",
                file=info.file.name,
                tensor=name,
            )


def _by_tensors(tensors: Mapping[str, TensorInfo]) -> Layout | None:
    experts: Layout | None = None
    for name, info in tensors.items():
        if name.endswith(".qweight"):
            return "quantized"
        if (EXPERT.match(name) or FUSED_EXPERTS.match(name)) and not name.endswith("_scale_inv"):
            if info.dtype == "F8_E4M3":
                experts = "fp8"
            elif experts is None and info.dtype in ("BF16", "F16", "F32"):
                experts = "bf16"
    return experts


def _expected(opened: Opened, layout: Layout, experts: str) -> Iterator[Expected]:
    """All but the n-gram table itself (its own check). Parts left out as a whole are reported elsewhere."""
    shape = opened.shape
    source: Layout = "fp8" if layout == "fp8" else "bf16"
    parts = [text_tensors(shape, source)]
    if shape.ngram is not None:
        parts += [ngram_constants(shape, index) for index in range(len(shape.ngram.layer_ids))]
    if opened.has("mtp."):
        parts.append(mtp_tensors(shape, source))
    tensors = chain.from_iterable(parts)
    if layout == "quantized":
        yield from _packed(opened, chain.from_iterable(map(unfuse, tensors)))
    elif experts == "per expert" and layout == "bf16":
        yield from chain.from_iterable(map(unfuse, tensors))
    else:
        yield from tensors
    vision = opened.config.get("vision_config")
    if isinstance(vision, Mapping) and opened.has("model.visual."):
        yield from vision_tensors(vision)


def _packed(opened: Opened, tensors: Iterator[Expected]) -> Iterator[Expected]:
    group_size = opened.quantization.get("group_size")
    for tensor in tensors:
        module = tensor.name.removesuffix(".weight")
        width = opened.widths.get(module) if len(tensor.shape) == 2 else None
        if width:
            group = _group_size(opened, module, group_size)
            yield from packed_tensors(module, tensor.shape[0], tensor.shape[1], width, group)
        elif width is None:
            yield tensor
        else:  # reported as bits-width
            for suffix in ("qweight", "qzeros", "scales"):
                if (info := opened.tensors.get(f"{module}.{suffix}")) is not None:
                    yield Expected(info.name, info.shape, (info.dtype,))


def _group_size(opened: Opened, module: str, base: object) -> int:
    extra = opened.quantization.get("extra_config")
    entry = extra.get(module) if isinstance(extra, Mapping) else None
    value = entry.get("group_size", base) if isinstance(entry, Mapping) else base
    return value if type(value) is int else -1


def _compare(expected: Expected, info: TensorInfo, findings: Findings) -> None:
    place = {"file": info.file.name, "tensor": expected.name}
    if info.dtype not in expected.dtypes:
        code = "scale-missing" if info.dtype == "F8_E4M3" else "dtype-wrong"
        findings.add(code, f"is {info.dtype}, {' or '.join(expected.dtypes)} expected", _INCOMPLETE, **place)
    elif info.shape != expected.shape:
        findings.add(
            "shape-wrong",
            f"has shape {list(info.shape)}, {list(expected.shape)} expected",
            _INCOMPLETE,
            **place,
        )


def _is_checked_elsewhere(name: str) -> bool:
    return bool(NGRAM_SHARD.match(name) or NGRAM_SCALE.search(name)) or name.endswith(
        ".ngram_embedding.weight"
    )


def _some(layers: set[str]) -> str:
    ordered = sorted(map(int, layers))
    return ", ".join(map(str, ordered[:4])) + (", ..." if len(ordered) > 4 else "")
