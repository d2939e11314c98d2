"""What `q38 quantize` will write: every output tensor, in its shard, before the first byte is read.

One shard for what lies outside the blocks, one per block, one each for MTP and vision where they are
kept. Packed matrices come from a method; everything else is copied from the source byte for byte.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from q38.base.errors import InputError
from q38.checkpoint.header import ITEM_BITS, TensorInfo
from q38.checkpoint.index import Checkpoint
from q38.model.expected import packed_tensors
from q38.model.names import FUSED_EXPERTS, Group, classify, layer_of, module_of
from q38.model.shape import ModelShape
from q38.quantize.sources import BLOCK_SCALE, FLOAT8, wanted_groups
from q38.recipe.bits import base_bits, plan_bits
from q38.recipe.resolve import HIGH
from q38.recipe.samples import host_memory, host_need
from q38.recipe.schema import Recipe
from q38.recipe.scratch import scratch_bytes


@dataclass(frozen=True, slots=True)
class Part:
    """One output tensor.

    kind: "packed" (a method makes it), "copy" (the source's bytes) or "dequantize" (fp8 codes times
        their block scales, as bfloat16).
    module: the module it belongs to.
    fused, begin: where a copy is one expert of a fused tensor of the source: that tensor's name, and the first of
        its bytes that belong to the expert.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    kind: Literal["packed", "copy", "dequantize"]
    module: str
    fused: str | None = None
    begin: int = 0

    @property
    def nbytes(self) -> int:
        size = ITEM_BITS[self.dtype] // 8
        for n in self.shape:
            size *= n
        return size


@dataclass(frozen=True)
class Shard:
    """One output file. `block` is its zero-based block, None outside the blocks."""

    unit: str
    file: str
    block: int | None
    parts: tuple[Part, ...]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    @cached_property
    def packed(self) -> tuple[str, ...]:
        """Names of the packed modules."""
        return tuple(dict.fromkeys(part.module for part in self.parts if part.kind == "packed"))


@dataclass(frozen=True)
class Plan:
    """Widths of all matrices, and all shards."""

    shape: ModelShape
    bits: dict[str, int]
    group_size: int
    shards: tuple[Shard, ...]
    read_bytes: int  # of the source

    @property
    def base_bits(self) -> int:
        return base_bits(self.bits)

    @property
    def blocks(self) -> list[Shard]:
        """The shards of the blocks, in order."""
        return [shard for shard in self.shards if shard.block is not None]

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)

    def bits_by_group(self) -> dict[str, dict[str, int]]:
        """Group -> width -> matrices."""
        table: dict[str, Counter[str]] = {}
        for name, width in self.bits.items():
            table.setdefault(str(classify(name)), Counter())[str(width)] += 1
        return {group: dict(widths) for group, widths in sorted(table.items())}


def make_plan(checkpoint: Checkpoint, recipe: Recipe) -> Plan:
    """Lay out the output of a source checkpoint (bf16 or FP8 release).

    Raises:
        InputError: the recipe does not fit the model, the source lacks a matrix that is to be packed
            or holds it in another shape, or an fp8 tensor has no scale.
    """
    shape = ModelShape.from_config(checkpoint.config, where=str(checkpoint.path / "config.json"))
    bits = plan_bits(checkpoint.config, recipe, requantized=False)
    base_bits(bits)  # refuses a recipe that leaves the experts alone
    group_size = recipe.quantize.group_size
    wanted = wanted_groups(recipe)
    by_unit: dict[tuple[int, int], list[Part]] = {}
    found: set[str] = set()
    read = 0
    for info in sorted(checkpoint.tensors.values(), key=lambda t: natural_key(t.name)):
        group = classify(info.name)
        if not wanted(group):
            continue
        read += info.nbytes
        if info.name.endswith(BLOCK_SCALE):
            continue
        for part in _parts(info, checkpoint, bits, group_size):
            if part.kind == "packed":
                found.add(part.module)
            by_unit.setdefault(_order(info.name, group), []).append(part)
    missing = next((n for n, width in bits.items() if width < HIGH and n not in found), None)
    if missing is not None:
        checkpoint.info(f"{missing}.weight")  # raises
    units = sorted(by_unit)
    shards = tuple(
        Shard(_UNITS[kind].format(n), f"model-{i:05d}-of-{len(units):05d}.safetensors", n if kind == 1 else None, tuple(by_unit[kind, n]))
        for i, (kind, n) in enumerate(units, 1)
    )  # fmt: skip
    return Plan(shape, bits, group_size, shards, read)


def natural_key(name: str) -> tuple[int | str, ...]:
    """Sort key that puts layers.2 before layers.10."""
    return tuple(int(piece) if piece.isdigit() else piece for piece in re.split(r"(\d+)", name))


def matrix_parts(module: str, n: int, k: int, width: int, group_size: int) -> Iterator[Part]:
    """The three tensors of one packed matrix [n, k]."""
    for tensor in packed_tensors(module, n, k, width, group_size):
        yield Part(tensor.name, tensor.dtypes[0], tensor.shape, "packed", module)


_UNITS = ("outside", "block {}", "mtp", "vision")


def _order(name: str, group: Group) -> tuple[int, int]:
    """(index into _UNITS, block)."""
    if group in (Group.MTP, Group.MTP_EXPERTS):
        return 2, 0
    if group is Group.VISION:
        return 3, 0
    block = layer_of(name)
    return (0, 0) if block is None else (1, block)


def _parts(
    info: TensorInfo, checkpoint: Checkpoint, bits: Mapping[str, int], group_size: int
) -> Iterable[Part]:
    module = module_of(info.name)
    if info.dtype in FLOAT8 and module + BLOCK_SCALE not in checkpoint.tensors:
        raise InputError(
            f"tensor {info.name} is fp8 and {module + BLOCK_SCALE} is missing",
            where=info.file,
            remedy="download the checkpoint again",
        )
    if (match := FUSED_EXPERTS.match(info.name)) and len(info.shape) == 3:
        begin = 0
        for expert, n, k in _unfused(match["layer"], match["proj"], info.shape):
            if bits.get(expert, HIGH) < HIGH:
                yield from matrix_parts(expert, n, k, bits[expert], group_size)
            else:
                yield Part(f"{expert}.weight", info.dtype, (n, k), "copy", expert, info.name, begin)
            begin += n * k * ITEM_BITS[info.dtype] // 8
        return
    width = bits.get(module, HIGH) if info.name.endswith(".weight") else HIGH
    if width < HIGH:
        n, k = info.shape
        yield from matrix_parts(module, n, k, width, group_size)
    elif info.dtype in FLOAT8:
        yield Part(info.name, "BF16", info.shape, "dequantize", module)
    else:
        yield Part(info.name, info.dtype, info.shape, "copy", module)


def _unfused(layer: str, projection: str, shape: tuple[int, ...]) -> Iterator[tuple[str, int, int]]:
    """(module, N, K) of each matrix in a fused expert tensor [E, N, K], in the order of its bytes."""
    experts, rows, columns = shape
    for e in range(experts):
        prefix = f"{layer}.mlp.experts.{e}"
        if projection == "down_proj":
            yield f"{prefix}.down_proj", rows, columns
        else:
            yield f"{prefix}.gate_proj", rows // 2, columns
            yield f"{prefix}.up_proj", rows // 2, columns


def describe(plan: Plan, recipe: Recipe, item: int) -> dict[str, Any]:
    """The plan for `--dry-run`: bits per group, bytes to be written, and what calibration takes.

    Args:
        item: bytes of a value of the block inputs: 2 on a GPU, 4 on a CPU.
    """
    calibration = recipe.calibration
    need = host_need(recipe, plan.shape, calibration.samples, host_memory(), item)
    return {
        "method": recipe.quantize.experts.method,
        "bits": plan.bits_by_group(),
        "group_size": plan.group_size,
        "blocks": len(plan.blocks),
        "tensors": sum(len(shard.parts) for shard in plan.shards),
        "reads": plan.read_bytes,
        "bytes": plan.nbytes,
        "shards": {shard.file: shard.nbytes for shard in plan.shards},
        "calibration": {
            "samples": calibration.samples,
            "seqlen": calibration.seqlen,
            "tokens": calibration.samples * calibration.seqlen,
            "cache_bytes": need.cache,
            "host_bytes": need.total,
            "scratch_bytes": scratch_bytes(recipe, plan.shape, calibration.samples, item),
        },
    }
