"""One quantized pool: rows go in rounded, and come out only through a gather that undoes the rounding.

On a GPU the kernels of q38.kernels.kv_cache write and read; elsewhere plain torch does, bit for bit the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from q38.kernels import kv_reference
from q38.kvcache.layout import SIDES, KvLayout, Part, Side
from q38.model.kv_format import INT8_G64, KvFormat

Memory = Callable[[Part, int], torch.Tensor]  # (part, bytes) -> uint8 [bytes]
_FP8 = torch.float8_e4m3fn


class Tiers(NamedTuple):
    """The ring of one layer's keys or values; `owner` is shared by both."""

    payload: torch.Tensor  # int8 [ring, heads, dim]
    scales: torch.Tensor  # fp16 [ring, heads, dim / 64]
    owner: torch.Tensor  # int32 [ring]


class Rows(NamedTuple):
    """Keys or values of one layer."""

    payload: (
        torch.Tensor
    )  # int8 [slots, heads, dim], uint8 [slots, heads, dim / 2] or fp8 [slots, heads, dim]
    scales: torch.Tensor | None  # fp16 [slots, heads, dim / group]
    tiers: Tiers | None


class KvPool:
    """The rows of every layer.

    Args:
        slots: rows of every buffer.
        memory: gives each buffer its bytes; ordinary zeroed tensors by default.

    Attributes:
        rows: per layer, by side.
    """

    def __init__(
        self,
        layout: KvLayout,
        slots: int,
        *,
        device: torch.device | str = "cpu",
        memory: Memory | None = None,
    ) -> None:
        self.layout, self.slots, self.device = layout, slots, torch.device(device)
        take = memory or self._ordinary
        self._buffers = {(p.layer, p.side, p.what): take(p, slots * p.row_bytes) for p in layout.parts()}
        self.rows: list[dict[Side, Rows]] = [self._layer(layer) for layer in range(layout.layers)]

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Round the keys and values of tokens and scatter them to their slots.

        Args:
            slots: int32 or int64 [n]; a negative slot is skipped.
            keys, values: [n, heads, dim], any float dtype.
        """
        most = self.layout.ring or max(len(slots), 1)
        for start in range(
            0, len(slots), most
        ):  # of tokens that meet at a place of the ring one write may own it
            part = slots[start : start + most]
            for side, new in zip(SIDES, (keys, values), strict=True):
                rows = self.rows[layer][side]
                # Keys and values share the owners, so the second write must not choose other winners.
                self._write(rows, part, new[start : start + most].contiguous(), stamp=side == "k")

    def gather(self, layer: int, side: Side, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """out[i] = the row of slots[i], in out's dtype; a negative slot leaves out[i] as it is.

        Args:
            slots: int32 or int64 [n]. out: [n, heads, dim], contiguous.
        """
        rows, kv = self.rows[layer][side], self.layout.rows
        if kv is None:
            return kv_reference.gather_plain(slots, rows.payload, out)
        assert rows.scales is not None
        if self.device.type != "cuda":
            return kv_reference.gather_rows(slots, rows.payload, rows.scales, kv, out, rows.tiers)
        from q38.kernels import kv_cache

        if rows.tiers is None:
            return kv_cache.gather_rows(slots, rows.payload, rows.scales, kv, out)
        return kv_cache.gather_rows_tiered(slots, _kernel_tiers(rows), out)

    def clear_first(self, slots: int) -> None:
        """Make the first slots finite: what padded steps read before anything was written."""
        for layer in self.rows:
            for rows in layer.values():
                rows.payload[:slots].view(torch.uint8).zero_()
                if rows.scales is not None:
                    rows.scales[:slots].fill_(1)

    def _write(self, rows: Rows, slots: torch.Tensor, new: torch.Tensor, *, stamp: bool) -> None:
        kv = self.layout.rows
        if kv is None:
            kv_reference.write_plain(new, slots, rows.payload)
            return
        assert rows.scales is not None
        if self.device.type != "cuda":
            kv_reference.write_rows(new, slots, rows.payload, rows.scales, kv, rows.tiers, stamp=stamp)
            return
        from q38.kernels import kv_cache

        if rows.tiers is None:
            kv_cache.write_rows(new, slots, rows.payload, rows.scales, kv)
        else:
            kv_cache.write_rows_tiered(new, slots, _kernel_tiers(rows), stamp=stamp)

    def _layer(self, layer: int) -> dict[Side, Rows]:
        heads, dim, ring, kv = self.layout.heads, self.layout.dim, self.layout.ring, self.layout.rows
        owner = torch.full((ring,), -1, dtype=torch.int32, device=self.device) if ring else None
        made: dict[Side, Rows] = {}
        for side in SIDES:
            bytes_ = self._buffers[(layer, side, "payload")]
            payload = bytes_.view(_payload_dtype(kv)).view(self.slots, heads, -1)
            scales = None
            if kv is not None:
                scales = (
                    self._buffers[(layer, side, "scales")].view(torch.float16).view(self.slots, heads, -1)
                )
            tiers = None
            if owner is not None:
                tiers = Tiers(
                    INT8_G64.payload(ring, heads, dim, self.device),
                    INT8_G64.scales(ring, heads, dim, self.device),
                    owner,
                )
            made[side] = Rows(payload, scales, tiers)
        return made

    def _ordinary(self, _part: Part, nbytes: int) -> torch.Tensor:
        return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)


def _payload_dtype(kv: KvFormat | None) -> torch.dtype:
    if kv is None:
        return _FP8
    return torch.int8 if kv.bits == 8 else torch.uint8


def _kernel_tiers(rows: Rows) -> kv_cache.KvTiers:  # type: ignore[name-defined]  # noqa: F821
    from q38.kernels import kv_cache

    assert rows.tiers is not None and rows.scales is not None
    return kv_cache.KvTiers.over(rows.payload, rows.scales, *rows.tiers)


def distinct(slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slots from 0 on that occur, ascending, and each slot's position among them (-1 for a negative slot).

    Returns:
        int64 [m], int64 of the shape of `slots`.
    """
    found = torch.unique(slots[slots >= 0]).long()
    at = torch.searchsorted(found, slots.long().clamp(min=0))
    return found, torch.where(slots >= 0, at, -1)


def gather_many(
    pool: KvPool, layer: int, slots: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of slots from 0 on, [n, heads, dim] of `dtype` each."""
    shape: Sequence[int] = (len(slots), pool.layout.heads, pool.layout.dim)
    out = [torch.empty(shape, dtype=dtype, device=slots.device) for _ in SIDES]
    return pool.gather(layer, "k", slots, out[0]), pool.gather(layer, "v", slots, out[1])
