"""What `q38 requant-int8` will do, settled before the first byte is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from q38.base.errors import InputError
from q38.checkpoint.header import TensorInfo
from q38.checkpoint.index import INDEX, Checkpoint
from q38.checkpoint.int8 import BITS
from q38.checkpoint.job import MANIFEST
from q38.checkpoint.source import SourceWeights
from q38.checkpoint.writer import TEMPORARY
from q38.model.expected import packed_tensors
from q38.recipe.bits import PACKING, plan_bits, quantization_config
from q38.recipe.resolve import HIGH
from q38.recipe.schema import Recipe

CONFIG = "config.json"
# A second quantization config would go stale; the manifest is written anew.
NOT_COPIED = (CONFIG, INDEX, MANIFEST, "quantization_config.json", "quantize_config.json")
Entry = tuple[str, str, tuple[int, ...], int]  # name, safetensors dtype, shape, bytes


@dataclass(frozen=True)
class Matrix:
    """One matrix to re-pack: [n, k] in the source and, in 16 bit, in the model."""

    module: str
    n: int
    k: int
    group_size: int

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"

    @property
    def entries(self) -> list[Entry]:
        """(name, dtype, shape, bytes) of the three packed tensors, in file order."""
        sizes = {"I32": 4, "F16": 2}
        return [
            (t.name, t.dtypes[0], t.shape, t.shape[0] * t.shape[1] * sizes[t.dtypes[0]])
            for t in packed_tensors(self.module, self.n, self.k, BITS, self.group_size)
        ]

    @property
    def nbytes(self) -> int:
        return sum(nbytes for _, _, _, nbytes in self.entries)

    @property
    def scratch_bytes(self) -> int:
        """Words [k / 4, n] in int32 and scales [k / group_size, n] in float16."""
        return self.n * self.k + 2 * self.n * self.k // self.group_size


@dataclass(frozen=True)
class Plan:
    """What will be done: the matrices, and the width of every matrix before and after."""

    matrices: tuple[Matrix, ...]
    before: dict[str, int]
    after: dict[str, int]


def make_plan(model: Checkpoint, source: SourceWeights, recipe: Recipe) -> Plan:
    """Which matrices are re-packed.

    Raises:
        InputError: the first thing that does not belong together.
    """
    where = model.path / CONFIG
    before = plan_bits(model.config, recipe, requantized=False)
    after = plan_bits(model.config, recipe)
    quantization_config(after, recipe)  # refuses fused modules with two widths
    group_size = recipe.quantize.group_size
    _check_config(model.config.get("quantization_config"), group_size, where)
    for module, width in before.items():
        if (stored := stored_bits(model, module)) != width:
            raise InputError(
                f"{module} is stored at {stored} bits, the recipe says {width}",
                where=model.path,
                remedy="give the recipe it was quantized with",
            )
    matrices = tuple(
        _matrix(module, model, source, group_size)
        for module, width in after.items()
        if width != before[module]
    )
    return Plan(matrices, before, after)


def stored_bits(model: Checkpoint, module: str) -> int:
    """Width as the files have it: qzeros [G, N * bits / 32] beside scales [G, N]; 0 where they fit no width."""
    zeros, scales = model.tensors.get(f"{module}.qzeros"), model.tensors.get(f"{module}.scales")
    if zeros is None or scales is None:
        return HIGH
    if len(zeros.shape) != 2 or len(scales.shape) != 2 or not scales.shape[1]:
        return 0
    return zeros.shape[1] * 32 // scales.shape[1]


def _check_config(found: object, group_size: int, where: Path) -> None:
    """The quantization_config is what `q38 quantize` writes, as far as a change of some widths relies on it."""
    wanted = {"quant_method": "auto-round", "group_size": group_size, "sym": True, "packing_format": PACKING}
    values = found if isinstance(found, Mapping) else {}
    for key, value in wanted.items():
        if values.get(key) != value or type(values[key]) is not type(value):
            raise InputError(
                f"quantization_config.{key} is {values.get(key, 'absent')!r:.60}, not {value!r}",
                where=where,
                remedy="give the output of q38 quantize and the recipe it was made with",
            )


def _matrix(module: str, model: Checkpoint, source: SourceWeights, group_size: int) -> Matrix:
    ours = model.info(f"{module}.weight")
    theirs = source.shape(module)
    if theirs is None:
        source.checkpoint.info(f"{module}.weight")  # raises
    if ours.shape != theirs or not _same_start(ours, model, source.checkpoint):
        raise differs(ours.name, source.checkpoint)
    return Matrix(module, *ours.shape, group_size)


def differs(name: str, source: Checkpoint) -> InputError:
    """The refusal of a source whose weights are not those of the model."""
    return InputError(
        f"tensor {name} differs between the model and the source",
        where=source.path,
        remedy="give the source that the model was quantized from",
    )


def _same_start(info: TensorInfo, model: Checkpoint, source: Checkpoint) -> bool:
    """Compare the first bytes, which shows most other sources at once; rounding compares the rest.

    quantize copies 16-bit tensors unchanged.
    """
    other = source.info(info.name)
    if other.dtype != info.dtype:
        return other.dtype.startswith("F8")  # dequantized on the way: no bytes to compare
    stop = min(info.nbytes, 2**16)
    return model.read_bytes(info.name, 0, stop) == source.read_bytes(info.name, 0, stop)


def extra_files(model: Checkpoint) -> list[Path]:
    """Tokenizer, chat template, generation config and whatever else lies beside the shards."""
    return [
        path
        for path in sorted(model.path.iterdir())
        if path.is_file()
        and path.name not in NOT_COPIED
        and path.suffix not in (".safetensors", TEMPORARY)
        and not path.name.startswith(".")
    ]
