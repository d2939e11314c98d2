"""What a recipe costs: bytes per group, bits per weight, disk per step, and what fits on one machine.

Everything derives from config.json and the recipe. The reserves are the only constants; each says
where it comes from.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB, MIB
from q38.checkpoint.header import ITEM_BITS
from q38.checkpoint.index import read_json
from q38.model.expected import Expected, ngram_tensors, quantized_tensors, source_tensors
from q38.model.kv import gdn_state_bytes, kv_bytes_per_token
from q38.model.names import Group, classify, module_of
from q38.model.shape import ModelShape
from q38.recipe.bits import plan_bits
from q38.recipe.samples import ITEM_GPU, MOST
from q38.recipe.schema import Recipe, load_recipe
from q38.recipe.scratch import scratch_bytes
from q38.residency.staging import ring_rows


@dataclass(frozen=True)
class Reserve:
    """Memory that no tensor list shows, in bytes."""

    # MEASURED on an H200 (docs/performance.md): 0.77 GiB before loading, 0.32 of kernels and their buffers, 0.23 of tables.
    cuda_context: int = 1376 * MIB
    graphs: int = 256 * MIB  # MEASURED there: 0.25 GiB for one decode graph and its workspaces
    host_process: int = 3 * GIB  # MEASURED there: 3.1 GB of three processes beside the pinned rows
    page_cache: int = 2 * GIB  # n-gram rows that decode reads again


_SCORES = 128 * MIB  # SGLang 0.5.23 scores a long chunk in pieces of this size (qsa_indexer.py)


@dataclass(frozen=True)
class GroupCost:
    """One parameter group of the finished checkpoint."""

    group: str
    parameters: int
    tensors: int
    bytes: int
    bits: dict[str, int]  # width -> matrices or vectors

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / self.parameters if self.parameters else 0.0


@dataclass(frozen=True)
class Sizes:
    """Bytes of the checkpoint a recipe makes. `ngram_bytes` lies beside it, in ple/."""

    groups: list[GroupCost]
    source_bytes: int
    source_tensors: int
    tensors: int
    tensor_bytes: int
    ngram_bytes: int
    parameters: int
    bits_per_weight: float  # 8 x tensor_bytes / parameters, n-gram table in neither
    published_bits_per_weight: float  # the formula others publish: bits + 20 / group_size, embedding left out
    row_bytes: int  # one expert as served: words and scales, no zeros
    disk: dict[str, int] = field(default_factory=dict)
    header_bytes: int = 0  # of the safetensors files, about: their JSON if it were one file


@dataclass(frozen=True)
class MachinePlan:
    """How the checkpoint lies on one GPU and its host. All sizes in bytes."""

    gpu_total: int
    ram_total: int
    context: int
    sequences: int
    kv_format: str
    chunk: int
    gpu: dict[str, int]
    host: dict[str, int]
    resident_per_layer: int  # S: experts of each layer in VRAM
    experts: int
    gpu_left: int
    ram_left: int


def read_cost(config: Path, recipe: str, *, source_layout: str = "bf16") -> tuple[dict[str, Any], Sizes]:
    """config.json, and the cost of the checkpoint that a recipe makes of it.

    Args:
        config: config.json, or a directory that holds one.
        recipe: recipe file, or the name of a shipped one.
        source_layout: "bf16" or "fp8", for the source's own bytes.

    Raises:
        InputError: one of them is none, or is broken.
    """
    if source_layout not in ("bf16", "fp8"):
        raise InputError(
            f"unknown layout '{source_layout}'", where="--source-layout", remedy="known: bf16, fp8"
        )
    file = config / "config.json" if config.is_dir() else config
    values, parsed = read_json(file), load_recipe(recipe)
    ModelShape.from_config(values, where=str(file))
    return values, sizes(values, parsed, plan_bits(values, parsed), source_layout=source_layout)


def sizes(
    config: Mapping[str, Any], recipe: Recipe, bits: Mapping[str, int], *, source_layout: str = "bf16"
) -> Sizes:
    """Cost of the finished checkpoint.

    Args:
        config: config.json.
        bits: module name -> width, as `q38.recipe.bits.plan_bits` resolves the recipe.
        source_layout: "bf16" or "fp8", for the source's own bytes.
    """
    shape = ModelShape.from_config(config)
    group_size = recipe.quantize.group_size
    layout: Any = source_layout
    source = list(source_tensors(config, layout))
    packed = list(
        quantized_tensors(
            config,
            bits,
            group_size,
            mtp=recipe.quantize.mtp == "keep",
            vision=recipe.quantize.vision == "keep",
        )
    )
    groups = _group_costs(packed, bits)
    tensor_bytes = sum(_bytes(t) for t in packed)
    parameters = sum(g.parameters for g in groups)
    ngram_layout: Any = "fp8" if recipe.ple.dtype == "f8_e4m3" else layout
    ngram_bytes = sum(_bytes(t) for t in ngram_tensors(shape, ngram_layout) if ".shard_" in t.name)
    source_bytes = sum(_bytes(t) for t in source)
    samples = recipe.calibration.samples or MOST  # auto takes fewer on a small host
    expert_bits = bits.get(next((m for m in bits if classify(m) is Group.EXPERTS), ""), 16)
    return Sizes(
        groups=groups,
        source_bytes=source_bytes,
        source_tensors=len(source),
        tensors=len(packed),
        tensor_bytes=tensor_bytes,
        header_bytes=_header_bytes(packed),
        ngram_bytes=ngram_bytes,
        parameters=parameters,
        bits_per_weight=8 * tensor_bytes / parameters,
        published_bits_per_weight=_published(packed, bits, group_size),
        row_bytes=expert_row_bytes(shape, expert_bits, group_size),
        disk={
            "source": source_bytes,
            "split-ple": ngram_bytes,
            "quantize": tensor_bytes,
            "quantize, more while it runs on a GPU": scratch_bytes(recipe, shape, samples, ITEM_GPU),
            "requant-int8": tensor_bytes,
        },
    )


def expert_row_bytes(shape: ModelShape, bits: int, group_size: int) -> int:
    """One expert as the server holds it: gate, up and down words and fp16 scales (symmetric: no zeros)."""
    weights = 3 * shape.moe_intermediate_size * shape.hidden_size
    return weights * bits // 8 + (weights // group_size * 2 if bits < 16 else 0)


def machine_plan(
    config: Mapping[str, Any],
    cost: Sizes,
    *,
    gpu_total: int,
    ram_total: int,
    context: int,
    kv_format: str,
    sequences: int = 1,
    states: int | None = None,
    chunk: int = 2048,
    reserve: Reserve | None = None,
) -> MachinePlan:
    """Split the expert rows between VRAM and pinned host memory.

    Every row lies in exactly one place, so rows that do not fit VRAM must fit the host. Where a chunk reads most of these, VRAM
    also holds the ring that they are staged in.

    Args:
        states: GDN states on the GPU; as many as sequences by default.

    Raises:
        ResourceError: the dense part does not fit the GPU, or the cold rows do not fit the host;
            the message names the shortfall in GiB.
    """
    shape = ModelShape.from_config(config)
    reserve = reserve or Reserve()
    expert_bytes = sum(g.bytes for g in cost.groups if g.group == Group.EXPERTS)
    vision = sum(g.bytes for g in cost.groups if g.group == Group.VISION)
    gpu = {
        "dense weights": cost.tensor_bytes - expert_bytes - vision,
        "KV cache": math.ceil(kv_bytes_per_token(shape, kv_format, context=context) * context) * sequences,
        "GDN state": gdn_state_bytes(shape) * ((states or sequences) + 1),  # SGLang pads by one slot
        "prefill working set": _working_set(shape, chunk, context),
        "CUDA context": reserve.cuda_context,
        "CUDA graphs": reserve.graphs,
    }
    free = gpu_total - sum(gpu.values())
    layer_rows = shape.num_layers * cost.row_bytes
    if free < 0:
        raise ResourceError(
            f"the dense part and {context} tokens of {kv_format} KV need {_gib(sum(gpu.values()))} GiB of VRAM, {_gib(gpu_total)} are there:"
            f" {_gib(-free)} GiB short",
            where="GPU",
            remedy="lower --context or --chunk, or choose a smaller --kv",
        )
    resident = min(free // layer_rows, shape.num_experts)
    slots = ring_rows(shape.num_experts - resident, shape.num_experts, chunk, shape.num_experts_per_tok)
    gpu["prefill staging"] = min(slots, free // cost.row_bytes) * cost.row_bytes
    free -= gpu["prefill staging"]
    resident = min(free // layer_rows, resident)
    pinned = (shape.num_experts - resident) * layer_rows
    host = {
        "pinned expert rows": pinned,
        "server process": reserve.host_process,
        "n-gram page cache": reserve.page_cache,
    }
    left = ram_total - sum(host.values())
    if left < 0:
        raise ResourceError(
            f"{shape.num_experts - resident} of {shape.num_experts} experts per layer stay on the host, which needs {_gib(sum(host.values()))} GiB"
            f" of RAM, {_gib(ram_total)} are there: {_gib(-left)} GiB short",
            where="host",
            remedy="lower --context, choose a smaller --kv, or add RAM",
        )
    return MachinePlan(
        gpu_total=gpu_total,
        ram_total=ram_total,
        context=context,
        sequences=sequences,
        kv_format=kv_format,
        chunk=chunk,
        gpu={**gpu, "resident expert rows": resident * layer_rows},
        host=host,
        resident_per_layer=resident,
        experts=shape.num_experts,
        gpu_left=free - resident * layer_rows,
        ram_left=left,
    )


def _working_set(shape: ModelShape, chunk: int, context: int) -> int:
    """Activations of one prefill chunk, at the end of the longest context.

    Counted, in bf16: the wide residual stream six times; gate, up, product, output and their packed copies of every chosen
    expert; the projections of a Gated DeltaNet layer seven times and its states, one every 64 tokens; the keys and values
    of one attention layer, gathered; and the scores of the indexer, float32, twice, as far as SGLang lets them grow. MEASURED at a chunk of 2,048 and a context
    of 10,000: 738 MiB on an H200 (docs/performance.md), 789 MiB by this formula.
    """
    stream = 6 * chunk * shape.hc_count * shape.hidden_size * 2
    routed = chunk * shape.num_experts_per_tok * (3 * shape.moe_intermediate_size + 2 * shape.hidden_size) * 2
    values = shape.linear_num_value_heads * shape.linear_value_head_dim
    gdn = chunk * values * 2 * 7 + chunk // 64 * values * shape.linear_key_head_dim * 2
    attention = 2 * shape.num_key_value_heads * shape.head_dim * 2 * context if shape.attention_layers else 0
    scores = (
        2 * min(chunk * context // shape.indexer_compress_ratio * 4, _SCORES) if shape.attention_layers else 0
    )
    return stream + routed + gdn + attention + scores


def _group_costs(packed: list[Expected], bits: Mapping[str, int]) -> list[GroupCost]:
    table: dict[Group, dict[str, Any]] = {}
    for tensor in packed:
        module = module_of(tensor.name)
        width = bits.get(module, 16)
        entry = table.setdefault(
            classify(tensor.name), {"parameters": 0, "tensors": 0, "bytes": 0, "bits": {}}
        )
        entry["tensors"] += 1
        entry["bytes"] += _bytes(tensor)
        if tensor.name.endswith((".qzeros", ".scales")):
            continue
        count = math.prod(tensor.shape)
        entry["parameters"] += count * 32 // width if tensor.name.endswith(".qweight") else count
        entry["bits"][str(width)] = entry["bits"].get(str(width), 0) + 1
    return [
        GroupCost(str(group), **entry)
        for group, entry in sorted(table.items(), key=lambda kv: -kv[1]["bytes"])
    ]


def _published(packed: list[Expected], bits: Mapping[str, int], group_size: int) -> float:
    total = weights = 0.0
    for tensor in packed:
        if tensor.name.endswith((".qzeros", ".scales")) or classify(tensor.name) is Group.EMBED:
            continue
        width = bits.get(module_of(tensor.name), 16)
        count = math.prod(tensor.shape) * (32 / width if width < 16 else 1)
        weights += count
        total += count * (width + 20 / group_size if width < 16 else 16)
    return total / weights


def _bytes(tensor: Expected) -> int:
    return math.prod(tensor.shape) * ITEM_BITS[tensor.dtypes[0]] // 8


def _header_bytes(tensors: list[Expected]) -> int:
    """Length of the JSON that describes the tensors, packed one after the other."""
    length = position = 0
    for tensor in tensors:
        end = position + _bytes(tensor)
        entry = f'"{tensor.name}":{{"dtype":"{tensor.dtypes[0]}","shape":{list(tensor.shape)},"data_offsets":[{position},{end}]}},'
        length += len(entry) - (len(tensor.shape) - 1)  # less the spaces that Python puts into a list
        position = end
    return length


def _gib(n: int) -> str:
    return f"{n / GIB:.2f}"
