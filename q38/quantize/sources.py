"""Whether a source checkpoint holds what its config.json describes, before a byte of the output is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from q38.base.errors import InputError
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import Checkpoint
from q38.model.expected import Expected, source_tensors, unfuse
from q38.model.names import FUSED_EXPERTS, Group, classify, module_of
from q38.model.shape import ModelShape
from q38.recipe.schema import Recipe

BLOCK_SCALE = ".weight_scale_inv"
FLOAT8 = ("F8_E4M3", "F8_E5M2")
LEFT_OUT = (Group.NGRAM,)  # the table goes to ple/
_FLOATS = ("BF16", "F16", "F32", "F64", *FLOAT8)
_METHODS = (None, "fp8")  # of quantization_config, of a source
# group -> the key of a recipe's quantize section that drops it
_OPTIONAL = {Group.MTP: "mtp", Group.MTP_EXPERTS: "mtp", Group.VISION: "vision"}


def wanted_groups(recipe: Recipe) -> Callable[[Group], bool]:
    """Whether the output holds a group, packed or not."""
    dropped = {group for group, key in _OPTIONAL.items() if getattr(recipe.quantize, key) == "drop"}
    return lambda group: group not in LEFT_OUT and group not in dropped


def require_source(checkpoint: Checkpoint, recipe: Recipe) -> None:
    """Refuse a source that is no complete bf16 or FP8 release of the model that its config.json describes.

    What the recipe drops and the n-gram table may be absent.

    Raises:
        InputError: it is quantized already, or the first tensor that is missing, has another shape or kind of
            dtype, or has no place in the model.
    """
    config, where = checkpoint.config, checkpoint.path / "config.json"
    _require_unquantized(config, where)
    ModelShape.from_config(config, where=str(where))
    wanted = wanted_groups(recipe)
    left = {name: info for name, info in checkpoint.tensors.items() if wanted(classify(name))}
    for expected in _expected(config, checkpoint):
        if wanted(classify(expected.name)):
            _require(expected, left.pop(expected.name, None), checkpoint)
    for name in list(left):
        if name.endswith(BLOCK_SCALE):
            _require_scales(left.pop(name), checkpoint)
    for info in left.values():
        raise InputError(
            f"tensor {info.name} has no place in the model that config.json describes",
            where=info.file,
            remedy="restore config.json of this checkpoint, or remove the tensor",
        )


def _require_unquantized(config: Mapping[str, Any], where: Path) -> None:
    value = config.get("quantization_config")
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    if method not in _METHODS:
        raise InputError(
            f"is already quantized ({method})", where=where, remedy="give the bf16 or FP8 release"
        )


def _expected(config: Mapping[str, Any], checkpoint: Checkpoint) -> Iterator[Expected]:
    """All tensors, the experts of a layer fused or one matrix each as the checkpoint has them."""
    for tensor in source_tensors(config):
        if classify(tensor.name) is Group.VISION and config.get("language_model_only"):
            continue
        if FUSED_EXPERTS.match(tensor.name) and tensor.name not in checkpoint.tensors:
            yield from unfuse(tensor)
        else:
            yield tensor


def _require(expected: Expected, info: TensorInfo | None, checkpoint: Checkpoint) -> None:
    if info is None:
        key = _OPTIONAL.get(classify(expected.name))
        raise InputError(
            f"tensor {expected.name} is missing",
            where=checkpoint.path,
            remedy="run q38 inspect on this directory" + (f", or set quantize.{key} to drop" if key else ""),
        )
    if info.shape != expected.shape:
        raise InputError(
            f"tensor {info.name} is {list(info.shape)}, config.json gives {list(expected.shape)}",
            where=info.file,
            remedy="restore config.json of this checkpoint, or download the file again",
        )
    if info.dtype not in (_FLOATS if expected.dtypes[0] == "BF16" else expected.dtypes):
        raise InputError(
            f"tensor {info.name} is {info.dtype}, a release has {expected.dtypes[0]} there",
            where=info.file,
            remedy="give the bf16 or FP8 release",
        )


def _require_scales(info: TensorInfo, checkpoint: Checkpoint) -> None:
    """Block scales have an fp8 matrix, and no more rows or columns than it has."""
    matrix = checkpoint.tensors.get(f"{module_of(info.name)}.weight")
    if (
        matrix is None
        or matrix.dtype not in FLOAT8
        or len(info.shape) != len(matrix.shape)
        or not all(0 < blocks <= size for blocks, size in zip(info.shape, matrix.shape, strict=True))
    ):
        found = "absent" if matrix is None else f"{matrix.dtype} {list(matrix.shape)}"
        raise InputError(
            f"tensor {info.name} {list(info.shape)} scales no fp8 matrix (its weight is {found})",
            where=info.file,
            remedy="download the file again",
        )
