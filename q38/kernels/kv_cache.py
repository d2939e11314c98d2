"""Kernels of the quantized KV formats: quantize and scatter on write, dequantizing gathers on read.

Formats, rounding rules and references: q38.kernels.kv_formats. Grids depend on shapes alone, so calls
can be captured; slots are read on the device.
"""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl

from q38.base.errors import InputError, ResourceError
from q38.kernels import kv_gather_cuda
from q38.model.kv_format import INT4_G32, INT8_G64, KvFormat

Backend = Literal["auto", "cuda", "triton"]
ROUND = 12582912.0  # 1.5 * 2**23: adding and subtracting it rounds a small float half to even


@triton.jit
def _quantize(value, QMAX: tl.constexpr, MAGIC: tl.constexpr):
    """[groups, group] fp32 -> codes fp32 [groups, group] and fp16 scales [groups]."""
    absmax = tl.max(tl.abs(value), 1)
    scale = tl.minimum(
        tl.where(absmax == 0, 1.0, tl.div_rn(absmax, tl.full(absmax.shape, QMAX, tl.float32))), 65504.0
    )
    stored = scale.to(tl.float16)
    wide = stored.to(tl.float32)
    divisor = tl.where(wide == 0, 1.0, wide)
    ratio = tl.div_rn(value, tl.broadcast_to(divisor[:, None], value.shape))
    limited = tl.minimum(tl.maximum(ratio, -QMAX - 0.0), QMAX + 0.0)
    codes = (limited + MAGIC) - MAGIC
    return tl.where(wide[:, None] == 0, 0.0, codes), stored


@triton.jit
def _write(
    rows, slots, payload, scales, owner, RING: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    GROUP: tl.constexpr, BITS: tl.constexpr, MAGIC: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slots + token).to(tl.int64)
    live = slot >= 0
    if RING > 0:
        place = slot % RING
        live = live & (tl.load(owner + place, mask=live, other=-1) == slot)
        slot = place
    GROUPS: tl.constexpr = DIM // GROUP
    if live:
        group = tl.arange(0, GROUPS)
        to = slot * HEADS + head
        source = rows + (token * HEADS + head) * DIM
        if BITS == 8:
            channel = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            codes, scale = _quantize(tl.load(source + channel).to(tl.float32), 127, MAGIC)
            tl.store(payload + to * DIM + channel, codes.to(tl.int8))
        else:
            # Even and odd channels apart; the scale comes from both halves.
            pair = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            even = tl.load(source + 2 * pair).to(tl.float32)
            odd = tl.load(source + 2 * pair + 1).to(tl.float32)
            codes, scale = _quantize(tl.join(even, odd).reshape(GROUPS, GROUP), 7, MAGIC)
            low, high = tl.split((codes + 8.0).to(tl.int32).reshape(GROUPS, GROUP // 2, 2))
            tl.store(payload + to * (DIM // 2) + pair, (low | (high << 4)).to(tl.uint8))
        tl.store(scales + to * GROUPS + group, scale)


@triton.jit(do_not_specialize=["n"])
def _stamp(slots, owner, n, RING: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + at, mask=at < n, other=-1).to(tl.int64)
    tl.store(owner + slot % RING, slot.to(tl.int32), mask=(at < n) & (slot >= 0))


@triton.jit(do_not_specialize=["n"])
def _gather(
    slots, payload, scales, ring_payload, ring_scales, owner, out, n,
    RING: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    RING_GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    head = tl.program_id(1)
    slot = tl.load(slots + at, mask=at < n, other=-1).to(tl.int64)
    live = slot >= 0
    channel = tl.arange(0, DIM)
    to = (slot * HEADS + head)[:, None]
    cold = live
    if RING > 0:
        place = slot % RING
        hot = live & (tl.load(owner + place, mask=live, other=-1) == slot)
        cold = live & (hot == 0)
        ring = (place * HEADS + head)[:, None]
        code8 = tl.load(ring_payload + ring * DIM + channel[None, :], mask=hot[:, None], other=0).to(
            tl.float32
        )
        scale8 = tl.load(
            ring_scales + ring * (DIM // RING_GROUP) + (channel // RING_GROUP)[None, :],
            mask=hot[:, None],
            other=0.0,
        ).to(tl.float32)
    scale = tl.load(
        scales + to * (DIM // GROUP) + (channel // GROUP)[None, :], mask=cold[:, None], other=0.0
    ).to(tl.float32)
    if BITS == 8:
        code = tl.load(payload + to * DIM + channel[None, :], mask=cold[:, None], other=0).to(tl.float32)
    else:
        half = tl.arange(0, DIM // 2)
        byte = tl.load(payload + to * (DIM // 2) + half[None, :], mask=cold[:, None], other=0).to(tl.int32)
        code = tl.join(byte & 15, byte >> 4).reshape(BLOCK, DIM).to(tl.float32) - 8.0
    value = code * scale
    if RING > 0:
        value = tl.where(hot[:, None], code8 * scale8, value)
    target = (at.to(tl.int64) * HEADS + head)[:, None] * DIM + channel[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=live[:, None])


def write_rows(
    rows: torch.Tensor, slots: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor, kv: KvFormat
) -> None:
    """Quantize rows and scatter them: payload[slots[i]], scales[slots[i]] = quantize(rows[i]).

    Args:
        rows: [n, heads, dim], any float dtype, contiguous.
        slots: int32 or int64 [n]; a negative slot is skipped.
        payload, scales: as KvFormat.payload and KvFormat.scales make them.
    """
    _launch_write(rows, slots, payload, scales, kv, owner=None)


def write_rows_tiered(rows: torch.Tensor, slots: torch.Tensor, tiers: KvTiers, *, stamp: bool = True) -> None:
    """Write every row to int4, and to the int8 ring where the slot holds its place.

    Args:
        rows, slots: as in write_rows; at most as many rows as the ring has.
        stamp: stamp the owners first. Once per launch pair is enough when keys and values share owners.

    Raises:
        InputError: more rows than places in the ring.
    """
    n, ring = slots.numel(), tiers.owner.numel()
    if n > ring:
        raise InputError(
            f"{n} rows for a ring of {ring}", where="tiered KV", remedy="write in smaller pieces"
        )
    if stamp and n:
        _stamp[(triton.cdiv(n, 256),)](slots, tiers.owner, n, RING=ring, BLOCK=256)
    write_rows(rows, slots, tiers.payload, tiers.scales, INT4_G32)
    _launch_write(rows, slots, tiers.ring_payload, tiers.ring_scales, INT8_G64, owner=tiers.owner)


def gather_rows(
    slots: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    kv: KvFormat,
    out: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Dequantize rows: out[i] = payload[slots[i]]; a negative slot leaves out[i] as it is.

    Serves the decode compaction (a few thousand selected rows) and the prefix rows of a prefill chunk.

    Args:
        slots: int32 or int64 [n].
        out: [n, heads, dim], the dtype wanted; its dim gives the channels.
        backend: "auto" takes CUDA (kv_gather.cu) where it can run, else Triton. The bits are the same.

    Raises:
        ResourceError: the CUDA backend was asked for and cannot run here.
    """
    return _launch_gather(slots, payload, scales, kv, out, None, backend)


def gather_rows_tiered(
    slots: torch.Tensor, tiers: KvTiers, out: torch.Tensor, *, backend: Backend = "auto"
) -> torch.Tensor:
    """As gather_rows, int8 where the ring still owns the slot, else int4."""
    return _launch_gather(slots, tiers.payload, tiers.scales, INT4_G32, out, tiers, backend)


class KvTiers:
    """The buffers of the tiered format for one of keys and values.

    Args:
        rows, heads, dim: of the int4 pool.
        ring: places of the int8 ring.
        owner: int32 [ring] shared with other KvTiers of the same slots; made (all -1) if absent.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        dim: int,
        ring: int,
        *,
        owner: torch.Tensor | None = None,
        device: torch.device | str = "cuda",
    ) -> None:
        self.payload = INT4_G32.payload(rows, heads, dim, device)
        self.scales = INT4_G32.scales(rows, heads, dim, device)
        self.ring_payload = INT8_G64.payload(ring, heads, dim, device)
        self.ring_scales = INT8_G64.scales(ring, heads, dim, device)
        self.owner = torch.full((ring,), -1, dtype=torch.int32, device=device) if owner is None else owner

    @classmethod
    def over(
        cls,
        payload: torch.Tensor,
        scales: torch.Tensor,
        ring_payload: torch.Tensor,
        ring_scales: torch.Tensor,
        owner: torch.Tensor,
    ) -> KvTiers:
        """The same over buffers that are there already."""
        tiers = cls.__new__(cls)
        tiers.payload, tiers.scales = payload, scales
        tiers.ring_payload, tiers.ring_scales, tiers.owner = ring_payload, ring_scales, owner
        return tiers


def _launch_write(
    rows: torch.Tensor,
    slots: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    kv: KvFormat,
    owner: torch.Tensor | None,
) -> None:
    n, heads, dim = rows.shape
    if n == 0:
        return
    _write[(n, heads)](
        rows, slots, payload, scales, slots if owner is None else owner,
        RING=0 if owner is None else owner.numel(), HEADS=heads, DIM=dim, GROUP=kv.group, BITS=kv.bits,
        MAGIC=ROUND, num_warps=1,
    )  # fmt: skip


def _launch_gather(
    slots: torch.Tensor,
    payload: torch.Tensor,
    scales: torch.Tensor,
    kv: KvFormat,
    out: torch.Tensor,
    tiers: KvTiers | None,
    backend: Backend,
) -> torch.Tensor:
    n, heads, dim = out.shape
    if n == 0:
        return out
    ring = (tiers.ring_payload, tiers.ring_scales, tiers.owner) if tiers else None
    reason = kv_gather_cuda.missing(kv, out)
    if backend == "cuda" and reason:
        raise ResourceError(reason, where="KV gather", remedy="use the Triton backend")
    if backend != "triton" and reason is None:
        kv_gather_cuda.gather(slots, payload, scales, kv, out, ring, kv_gather_cuda.GatherConfig())
        return out
    block = 4
    _gather[(triton.cdiv(n, block), heads)](
        slots, payload, scales, *(ring or (payload, scales, slots)), out, n,
        RING=tiers.owner.numel() if tiers else 0, HEADS=heads, DIM=dim, BITS=kv.bits, GROUP=kv.group,
        RING_GROUP=INT8_G64.group, BLOCK=block, num_warps=1,
    )  # fmt: skip
    return out
