"""What a model takes on this machine, in bytes, before anything is loaded; refused where it cannot fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.base.memory import available_memory
from q38.base.units import MIB, format_bytes
from q38.checkpoint.index import Checkpoint
from q38.kvcache.layout import KvLayout
from q38.model.kv import gdn_state_bytes, kv_bytes_per_token
from q38.model.names import Group
from q38.model.shape import ModelShape
from q38.ple.table import read_info
from q38.recipe.budget import GroupCost, MachinePlan, Reserve, Sizes, expert_row_bytes, machine_plan
from q38.serving.kv_choice import refuse_unreadable
from q38.serving.machine import probe_gpus
from q38.serving.sglang_settings import Resolved, SglangSettings
from q38.sglang_ext.options import DECODE_TOKENS

_GRANULE = 2 * MIB  # of mapped device memory
_SPARE = 16  # row slots kept free on both sides, so that rows can be exchanged
_CHUNKS = (8192, 4096)  # tokens of a prefill step, tried in this order
# Of the rows in GPU memory that a step of the shortest length leaves: with the published skew a tenth is worth two to
# three points of the hit rate, some 15 MB of host rows a decoded token (DERIVED).
_KEPT = 0.9


@dataclass(frozen=True)
class ServePlan:
    """Bytes by what they hold. `device` is empty on a CPU.

    device_rows: expert rows that start in device memory; fewest_device_rows: the fewest there can be. spare: free row slots on either side.
    staging: row slots in device memory that prompt steps copy host rows to, ahead of the layers that read them.
    chunk: prompt tokens of one prefill step.
    reserve: bytes of device memory that rows leave to the rest.
    kv: format of the KV cache; kv_bytes: bytes a token. kv_lazy: its memory is mapped as it is needed, which the
        experts use until then; kv_headroom: device memory that stays free for a step meanwhile.
    static: share of the device memory free at start for all that stays allocated; the rest is working memory.
    """

    device: dict[str, int]
    host: dict[str, int]
    disk: dict[str, int]
    rows: int
    device_rows: int
    fewest_device_rows: int
    spare: int
    reserve: int
    chunk: int
    staging: int = 0
    kv: str = "bf16"
    kv_bytes: float = 0.0
    kv_lazy: bool = False
    kv_headroom: int = 0
    static: float = 0.95

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))

    def lines(self) -> list[str]:
        """For people: one line a place."""
        places = (("GPU", self.device), ("host", self.host), ("disk", self.disk))
        told = [
            f"{place}: " + ", ".join(f"{what} {format_bytes(n)}" for what, n in parts.items())
            for place, parts in places
            if parts
        ]
        kv = f"KV cache: {self.kv}, {self.kv_bytes:,.0f} bytes a token"
        if not self.device:
            return [*told, kv]
        rows = f"expert rows: {self.device_rows} of {self.rows} in GPU memory"
        if self.kv_lazy and self.device_rows > self.fewest_device_rows:
            rows += f", {self.fewest_device_rows} once the whole context is in use"
        return [*told, kv, f"{rows}; prompts in steps of {self.chunk} tokens"]


@dataclass(frozen=True)
class Weights:
    """What a plan needs to know of a checkpoint, whether or not it is there yet.

    config: config.json. groups: bytes of each parameter group. row_bytes: of one expert as it is served.
    """

    config: Mapping[str, Any]
    groups: Mapping[Group, int]
    row_bytes: int

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Weights:
        """Those of a checkpoint.

        Raises:
            InputError: the experts are not packed at 2 bits.
        """
        shape = ModelShape.from_config(checkpoint.config)
        return cls(checkpoint.config, checkpoint.group_bytes, _row_bytes(checkpoint, shape))


def make_plan(
    checkpoint: Checkpoint, settings: SglangSettings, resolved: Resolved, table: Path | None
) -> ServePlan:
    """Plan one server on this machine.

    Raises:
        ResourceError: it does not fit; the message gives the shortfall.
        InputError: the experts are not packed at 2 bits.
    """
    weights = Weights.of(checkpoint)
    ram = min(settings.ram or available_memory(), available_memory())
    gpu = 0 if resolved.device == "cpu" else _gpu_memory(settings, resolved)
    plan = plan_for(weights, settings, resolved, gpu=gpu, ram=ram)
    return plan if table is None else replace(plan, disk={"n-gram table": read_info(table).bytes})


def plan_for(
    weights: Weights, settings: SglangSettings, resolved: Resolved, *, gpu: int, ram: int
) -> ServePlan:
    """Plan one server on any machine.

    Args:
        gpu, ram: bytes of the device and of the host that it may use.

    Raises:
        ResourceError: it does not fit; the message gives the shortfall.
        InputError: more requests at a time than a step has room for.
    """
    if resolved.requests > DECODE_TOKENS:
        raise InputError(
            f"{resolved.requests} requests at a time, the buffer of n-gram rows holds {DECODE_TOKENS}",
            where="--requests",
            remedy=f"pass {DECODE_TOKENS} or fewer",
        )
    shape, row_bytes = ModelShape.from_config(weights.config), weights.row_bytes
    rows = shape.num_layers * shape.num_experts
    dense = sum(n for group, n in weights.groups.items() if group not in _ELSEWHERE)
    if settings.int8_mixes:
        dense -= _saved_by_int8(shape)
    if resolved.device == "cpu":
        return _on_cpu(shape, resolved, dense, rows, row_bytes, ram)
    machine = _widest(
        lambda chunk: _on_gpu(weights, replace(resolved, chunk=chunk), dense, gpu, ram),
        resolved,
        given=settings.chunk is not None,
    )
    resident = _resident(settings, machine, shape, row_bytes)
    fewest = max(resident * shape.num_layers - _SPARE, 0)
    # Until the cache takes that memory, it holds experts.
    later = _mapped_later(shape, resolved)
    reserve = sum(
        n for what, n in machine.gpu.items() if what not in ("resident expert rows", "dense weights")
    )
    working = machine.gpu["prefill working set"] + machine.gpu["CUDA graphs"]
    fewer = (machine.resident_per_layer - resident) * shape.num_layers * row_bytes
    return ServePlan(
        device={
            **machine.gpu,
            "resident expert rows": machine.gpu["resident expert rows"] - fewer,
            "left": machine.gpu_left + fewer,
        },
        host={
            **machine.host,
            "pinned expert rows": machine.host["pinned expert rows"] + fewer,
            "left": machine.ram_left - fewer,
        },
        disk={},
        rows=rows,
        device_rows=min(fewest + later // row_bytes, rows),
        fewest_device_rows=fewest,
        spare=_SPARE,
        reserve=reserve - later,
        chunk=machine.chunk,
        staging=machine.gpu["prefill staging"] // row_bytes,
        static=round(1 - working / max(machine.gpu_total - machine.gpu["CUDA context"], 1), 4),
        kv_lazy=resolved.stored_kv is not None,
        kv_headroom=machine.gpu["prefill working set"],
        **_kv(shape, resolved),
    )


def _widest(plan: Callable[[int], MachinePlan], resolved: Resolved, *, given: bool) -> MachinePlan:
    """The plan of the longest prefill step whose working memory leaves nearly all rows in GPU memory.

    A step reads every host row once however long it is, so prefill speeds up with its length; decode slows down with each row
    that moves to the host.
    """
    least = plan(resolved.chunk)
    for chunk in () if given else _CHUNKS:
        if resolved.chunk < chunk <= resolved.context:
            try:
                wider = plan(chunk)
            except ResourceError:
                continue
            if wider.resident_per_layer >= _KEPT * least.resident_per_layer:
                return wider
    return least


def _kv(shape: ModelShape, resolved: Resolved) -> dict[str, Any]:
    return {
        "kv": resolved.kv,
        "kv_bytes": kv_bytes_per_token(shape, resolved.kv, context=resolved.context, ring=resolved.kv_ring),
    }


def _mapped_later(shape: ModelShape, resolved: Resolved) -> int:
    """Bytes of the KV cache that are mapped when tokens come; a ring and the index are there from the start."""
    if resolved.stored_kv is None:
        return 0
    layout = KvLayout.of(shape, resolved.stored_kv, ring=resolved.kv_ring)
    rows = layout.bytes_per_slot * resolved.context * resolved.requests
    return max(rows - len(layout.parts()) * _GRANULE, 0)  # the page of padded steps is backed from the start


def _resident(settings: SglangSettings, machine: MachinePlan, shape: ModelShape, row_bytes: int) -> int:
    """Experts of each layer in GPU memory: --resident, or as many as fit.

    Raises:
        InputError: more than a layer has. ResourceError: more than fit, on either side.
    """
    wanted, most = settings.resident, machine.resident_per_layer
    if wanted is None:
        return most
    if wanted > shape.num_experts:
        raise InputError(
            f"{wanted} of {shape.num_experts} experts",
            where="--resident",
            remedy=f"use {shape.num_experts} or fewer",
        )
    moved = (most - wanted) * shape.num_layers * row_bytes
    if wanted > most or moved > machine.ram_left:
        side = "GPU" if wanted > most else "host"
        short = -moved if wanted > most else moved - machine.ram_left
        raise ResourceError(
            f"{wanted} experts of each layer in GPU memory: the {side} is {format_bytes(short)} short",
            where="--resident",
            remedy="leave it out: as many as fit are taken",
        )
    return wanted


_ELSEWHERE = (Group.EXPERTS, Group.NGRAM, Group.MTP, Group.MTP_EXPERTS, Group.VISION)


def _on_cpu(
    shape: ModelShape,
    resolved: Resolved,
    dense: int,
    rows: int,
    row_bytes: int,
    ram: int,
) -> ServePlan:
    kv = (
        kv_bytes_per_token(shape, resolved.kv, context=resolved.context)
        * resolved.context
        * resolved.requests
    )
    host = {
        "dense weights": 4 * dense,  # packed matrices are unpacked to bf16
        "expert rows": (rows + rows // 2 + 2 * _SPARE) * row_bytes,
        "KV cache": int(kv),
        "GDN state": gdn_state_bytes(shape) * (resolved.states + 1),
        "server processes": Reserve().host_process,
    }
    _require(sum(host.values()), ram)
    return ServePlan(
        device={},
        host=host,
        disk={},
        rows=rows,
        device_rows=rows,
        fewest_device_rows=rows // 2,
        spare=_SPARE,
        reserve=0,
        chunk=resolved.chunk,
        kv_lazy=resolved.stored_kv is not None,
        **_kv(shape, resolved),
    )


def _gpu_memory(settings: SglangSettings, resolved: Resolved) -> int:
    """Bytes that the server may use of this machine's first GPU.

    Raises:
        ResourceError: there is none. InputError: it cannot read the KV format.
    """
    gpus = probe_gpus()
    if not gpus:
        raise ResourceError("no CUDA GPU", where="--device", remedy="use a machine with one, or --device cpu")
    refuse_unreadable(resolved.kv, gpus[0])
    free = gpus[0].memory_free
    return min(settings.gpu_memory or free, free)


def _on_gpu(weights: Weights, resolved: Resolved, dense: int, gpu: int, ram: int) -> MachinePlan:
    expert_bytes = weights.groups[Group.EXPERTS]
    cost = Sizes(
        groups=[GroupCost(str(Group.EXPERTS), 0, 0, expert_bytes, {})],
        source_bytes=0,
        source_tensors=0,
        tensors=0,
        tensor_bytes=dense + expert_bytes,
        ngram_bytes=0,
        parameters=0,
        bits_per_weight=0.0,
        published_bits_per_weight=0.0,
        row_bytes=weights.row_bytes,
    )
    return machine_plan(
        weights.config,
        cost,
        gpu_total=gpu,
        ram_total=ram,
        context=resolved.context,
        kv_format=resolved.kv,
        sequences=resolved.requests,
        states=resolved.states,
        chunk=resolved.chunk,
    )


def _saved_by_int8(shape: ModelShape) -> int:
    """Bytes of the mixes' matrices that rounding saves: a byte a weight, less a scale for every 64 at most."""
    weights = 2 * shape.hc_count * shape.hidden_size * shape.hc_lowrank * (2 * shape.num_layers + 1)
    return weights - 2 * weights // 64


def _row_bytes(checkpoint: Checkpoint, shape: ModelShape) -> int:
    quantization = checkpoint.config.get("quantization_config") or {}
    bits, group = quantization.get("bits"), quantization.get("group_size")
    if bits != 2 or not isinstance(group, int):
        raise InputError(
            f"experts at {bits or 16} bits, the sglang engine serves 2-bit experts",
            where=checkpoint.path / "config.json",
            remedy="quantize with q38 quantize, or use --engine transformers",
        )
    return expert_row_bytes(shape, bits, group)


def _require(needed: int, ram: int) -> None:
    if needed > ram:
        raise ResourceError(
            f"{format_bytes(needed)} needed, {format_bytes(ram)} there: {format_bytes(needed - ram)} short",
            where="host memory",
            remedy="lower --context or --requests",
        )
