"""A checkpoint as a transformers model: the bf16 release, the FP8 release, or packed by AutoRound.

The n-gram table never enters memory: its rows come from the split file, or straight from the shards.
A model with a randomly initialized weight is never returned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from q38.base.errors import InputError, ResourceError
from q38.checkpoint.index import Checkpoint
from q38.hf.quiet import silence_autoround, silence_libraries
from q38.hf.unpack import unpack_linears, unpacked_bytes
from q38.model.names import EXPERT, NGRAM_SCALE, NGRAM_SHARD, Group, classify
from q38.model.shape import ModelShape
from q38.ple.find import find_ple
from q38.ple.reader import PleTable

_INSPECT = "run q38 inspect on this directory"
_NOT_LOADED = (Group.NGRAM, Group.MTP, Group.MTP_EXPERTS)


def load_model(
    path: Path,
    *,
    ple: Path | None = None,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    unpack: bool = False,
) -> Any:
    """Load a model in eval mode, without gradients.

    Composite configs give Qwen4ExpForConditionalGeneration (`model.visual` is None where the vision
    tower was dropped), text configs Qwen4ExpForCausalLM; `model.get_decoder().layers` are the blocks of both.
    FP8 experts are dequantized to `dtype`. Packed matrices stay packed in AutoRound's own modules, which
    unpack at every call.

    Args:
        path: checkpoint directory.
        ple: directory of the split n-gram table. Default: the table in the checkpoint if it has one
            (it is the exact one), then PATH/ple, then ple beside PATH.
        dtype: of weights and activations. float32 is several times faster on a CPU without bf16 units.
        unpack: turn packed matrices into nn.Linear of `dtype` once: faster, and 16 / bits the memory.
            AutoRound's modules know no float32, so there it is always done.
        device: "cpu" or a torch device for the whole model; the table stays on disk.

    Raises:
        InputError: a tensor is missing, unexpected or of another shape (the first is named); mtp.* is
            ignored, and so is model.visual.* where the config says language_model_only. No n-gram table.
        ResourceError: the checkpoint is packed and auto-round is not installed.
    """
    path = Path(path)
    silence_libraries()
    checkpoint = Checkpoint.open(path)
    shape = ModelShape.from_config(checkpoint.config, where=str(path / "config.json"))
    _require_scales(checkpoint)
    _require_experts(checkpoint, shape.num_experts)
    table = open_table(checkpoint, ple) if shape.ngram else None
    # After the checks: importing transformers' model takes seconds.
    from q38.hf.hooks import ngram_lookup, without_vision

    with ExitStack() as stack:
        if table is not None:
            stack.enter_context(ngram_lookup(table, dtype=dtype))
        if not has_vision(checkpoint.config):
            stack.enter_context(without_vision())
        packed = _is_packed(checkpoint)
        loaded_dtype = torch.bfloat16 if packed and dtype == torch.float32 else dtype
        model, report = _from_pretrained(checkpoint, loaded_dtype, device)
    _require_complete(report, checkpoint)
    if packed and (unpack or dtype == torch.float32):
        unpack_linears(model, dtype)
        model.to(dtype)
    return model.eval().requires_grad_(False)


def weight_bytes(checkpoint: Checkpoint, dtype: torch.dtype = torch.bfloat16, *, unpack: bool = False) -> int:
    """Bytes of the weights that `load_model` with the same arguments leaves in memory; it takes more while it loads."""
    packed = _is_packed(checkpoint)
    unpacked = packed and (unpack or dtype == torch.float32)
    left_out = _NOT_LOADED if has_vision(checkpoint.config) else (*_NOT_LOADED, Group.VISION)
    kept = [info for info in checkpoint.tensors.values() if classify(info.name) not in left_out]
    if packed and not unpacked:
        return sum(info.nbytes for info in kept)
    plain = sum(
        info.numel * dtype.itemsize
        for info in kept
        if not info.name.endswith((".qweight", ".qzeros", ".scales", "_scale_inv"))
    )
    return plain + (unpacked_bytes(checkpoint, dtype.itemsize) if unpacked else 0)


def load_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint directory.

    Raises:
        InputError: its files are missing or broken.
    """
    silence_libraries()
    if not (Path(path) / "tokenizer_config.json").exists():
        raise InputError(
            "holds no tokenizer_config.json", where=path, remedy="copy the tokenizer files of the release"
        )
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # noqa: BLE001
        # The tokenizers library raises bare Exception for a broken file.
        raise InputError(
            f"the tokenizer cannot be loaded ({_one_line(error)})",
            where=path,
            remedy="copy the tokenizer files of the release",
        ) from None


def open_table(checkpoint: Checkpoint, ple: Path | None = None) -> PleTable:
    """The n-gram table that belongs to a checkpoint; see `load_model` for the order.

    Raises:
        InputError: there is none, or it is broken.
    """
    if ple is None and any(_is_table(name) for name in checkpoint.tensors):
        return PleTable.from_checkpoint(checkpoint)
    directory = find_ple(checkpoint.path, ple)
    if directory is None:
        raise InputError(
            "no n-gram table in the checkpoint, in ple/ or beside it",
            where=checkpoint.path,
            remedy="give its directory with --ple, or make it with q38 split-ple",
        )
    return PleTable.open(directory)


def has_vision(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint is meant to hold a vision tower."""
    return isinstance(config.get("vision_config"), Mapping) and not config.get("language_model_only", False)


def _is_table(name: str) -> bool:
    return bool(NGRAM_SHARD.match(name)) or name.endswith(".ngram_embedding.weight")


def _require_scales(checkpoint: Checkpoint) -> None:
    """FP8 codes without their scale would load as values, off by orders of magnitude."""
    for name, info in checkpoint.tensors.items():
        if info.dtype == "F8_E4M3" and not _is_table(name) and f"{name}_scale_inv" not in checkpoint.tensors:
            raise InputError(
                f"tensor {name} is fp8 and has no {name}_scale_inv", where=info.file, remedy=_INSPECT
            )


def _require_experts(checkpoint: Checkpoint, count: int) -> None:
    """transformers stacks whatever experts it finds and then reports a shape, not the one that is missing."""
    found: dict[tuple[str, str, str], set[int]] = defaultdict(set)
    for name in checkpoint.tensors:
        if match := EXPERT.match(name):
            found[match["layer"], match["proj"], match["suffix"] or ""].add(int(match["expert"]))
    for (layer, projection, suffix), experts in found.items():
        missing = next((e for e in range(count) if e not in experts), None)
        if missing is not None:
            raise InputError(
                f"tensor {layer}.mlp.experts.{missing}.{projection}{suffix} is missing",
                where=checkpoint.path,
                remedy=_INSPECT,
            )


def _from_pretrained(checkpoint: Checkpoint, dtype: torch.dtype, device: str) -> tuple[Any, dict[str, Any]]:
    from transformers import FineGrainedFP8Config
    from transformers.models.qwen4_exp import Qwen4ExpForCausalLM, Qwen4ExpForConditionalGeneration

    config = model_config(checkpoint)
    text_only = checkpoint.config.get("model_type") == "qwen4_exp_text"
    model_class = Qwen4ExpForCausalLM if text_only else Qwen4ExpForConditionalGeneration
    options: dict[str, Any] = {}
    method = _quant_method(checkpoint)
    if method == "fp8":
        options["quantization_config"] = FineGrainedFP8Config(dequantize=True)
    elif method is not None:
        try:
            silence_autoround()
        except ImportError:
            raise ResourceError(
                "auto-round is not installed, and this checkpoint is packed",
                where=checkpoint.path,
                remedy="pip install 'q38[quant]'",
            ) from None
    if device != "cpu":
        options["device_map"] = {"": device}
    try:
        return model_class.from_pretrained(  # type: ignore[no-any-return]
            str(checkpoint.path),
            config=config,
            dtype=dtype,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported and refused below, with names
            **options,
        )
    except (ValueError, RuntimeError, KeyError) as error:
        raise InputError(
            f"transformers cannot load it ({_one_line(error)})", where=checkpoint.path, remedy=_INSPECT
        ) from error


def _quant_method(checkpoint: Checkpoint) -> str | None:
    method = (checkpoint.config.get("quantization_config") or {}).get("quant_method")
    return None if method is None else str(method)


def _is_packed(checkpoint: Checkpoint) -> bool:
    return _quant_method(checkpoint) not in (None, "fp8")


def model_config(checkpoint: Checkpoint) -> Any:
    """transformers' config object; 5.19 knows the release's spelling of the layer types only."""
    from transformers.models.qwen4_exp import Qwen4ExpConfig, Qwen4ExpTextConfig

    raw = dict(checkpoint.config)
    shape = ModelShape.from_config(raw)
    where = checkpoint.path / "config.json"
    try:
        if raw.get("model_type") == "qwen4_exp_text":
            return Qwen4ExpTextConfig.from_dict({**raw, "layer_types": list(shape.layer_types)})
        raw["text_config"] = {**raw["text_config"], "layer_types": list(shape.layer_types)}
        return Qwen4ExpConfig.from_dict(raw)
    except Exception as error:  # noqa: BLE001
        # Its strict dataclasses raise their own family of errors for a wrong field.
        raise InputError(
            f"transformers refuses the config ({_one_line(error)})", where=where, remedy="restore config.json"
        ) from None


def _require_complete(report: Mapping[str, Any], checkpoint: Checkpoint) -> None:
    vision = has_vision(checkpoint.config)
    missing = sorted(report["missing_keys"])
    unexpected = sorted(
        name
        for name in report["unexpected_keys"]
        if not (
            _is_table(name) or NGRAM_SCALE.search(name) or (not vision and name.startswith("model.visual."))
        )
    )
    mismatched = sorted(report["mismatched_keys"])
    if missing:
        dropped = vision and all(name.startswith("model.visual.") for name in missing)
        raise InputError(
            f"{len(missing)} tensors are missing, first {missing[0]}",
            where=checkpoint.path,
            remedy="set language_model_only to true in config.json if vision was dropped"
            if dropped
            else _INSPECT,
        )
    if mismatched:
        name, found, wanted = mismatched[0]
        raise InputError(
            f"tensor {name} has shape {list(found)}, the model wants {list(wanted)}",
            where=checkpoint.path,
            remedy=_INSPECT,
        )
    if unexpected:
        raise InputError(
            f"{len(unexpected)} tensors are unexpected, first {unexpected[0]}",
            where=checkpoint.path,
            remedy=_INSPECT,
        )
    if report.get("error_msgs"):
        raise InputError(
            f"transformers reports: {_one_line(report['error_msgs'][0])}",
            where=checkpoint.path,
            remedy=_INSPECT,
        )


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:200]
