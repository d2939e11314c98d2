"""Move expert rows: batched copies on a copy stream, and a gather kernel that takes addresses on the device.

Copies are driven by the host (it must know which rows), leave the multiprocessors free and reach the
link rate. The gather takes its list from device memory, so nothing waits for the host, and reads
pinned rows through the link or device rows at memory speed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from q38.base.errors import InputError


class RowMover:
    """Copies rows between pools on a stream of its own.

    Args:
        device: the device side of the copies; with a CPU device, copies are plain and immediate.
        batched: use cuMemcpyBatchAsync (CUDA 12.8 and later) where cuda-python has it.
    """

    def __init__(self, device: torch.device | str = "cuda", *, batched: bool = True) -> None:
        self.device = torch.device(device)
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._driver: Any = _batch_driver() if batched and self.stream is not None else None

    @property
    def batched(self) -> bool:
        """Whether one driver call carries all rows of a copy."""
        return self._driver is not None

    def copy(
        self, source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, places: Sequence[int]
    ) -> torch.cuda.Event | None:
        """target[places[i]] = source[rows[i]] for all i, after the work queued on the current stream.

        Args:
            source, target: uint8 [n, row_bytes], contiguous rows; a host pool must be pinned.

        Returns:
            An event that the consumer's stream waits for; None on the CPU.

        Raises:
            InputError: the lists or the row sizes differ, or an index is outside its pool.
        """
        if len(rows) != len(places) or source.shape[1] != target.shape[1]:
            raise InputError(
                f"{len(rows)} rows of {source.shape[1]} bytes to {len(places)} places of {target.shape[1]}",
                where="row mover",
                remedy="give one place of the same size per row",
            )
        for name, index, pool in (("row", rows, source), ("place", places, target)):
            outside = next((i for i in index if not 0 <= i < pool.shape[0]), None)
            if outside is not None:
                raise InputError(
                    f"{name} {outside} of a pool of {pool.shape[0]}",
                    where="row mover",
                    remedy="pass valid indices",
                )
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.device))
        if self._driver is not None and rows:
            self._copy_batch(source, rows, target, places)
        else:
            with torch.cuda.stream(self.stream) if self.stream else contextlib.nullcontext():
                for row, place in zip(rows, places, strict=True):
                    target[place].copy_(source[row], non_blocking=True)
        return None if self.stream is None else self.stream.record_event()

    def _copy_batch(
        self, source: torch.Tensor, rows: Sequence[int], target: torch.Tensor, places: Sequence[int]
    ) -> None:
        from q38.kernels.nvrtc import check

        driver, nbytes, count = self._driver, source.shape[1], len(rows)
        attributes = driver.CUmemcpyAttributes()
        attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
        targets = [driver.CUdeviceptr(target.data_ptr() + i * nbytes) for i in places]
        sources = [driver.CUdeviceptr(source.data_ptr() + i * nbytes) for i in rows]
        assert self.stream is not None
        check(
            driver.cuMemcpyBatchAsync(
                targets, sources, [nbytes] * count, count, [attributes], [0], 1, self.stream.cuda_stream
            ),
            "cuMemcpyBatchAsync",
        )


@triton.jit
def _gather(addresses, out, base, base_address, LONGS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(1)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = base + ((tl.load(addresses + row) - base_address) >> 4) * 2
    value = tl.load(source + at, mask=at < LONGS, other=0)
    tl.store(out + row.to(tl.int64) * LONGS + at, value, mask=at < LONGS)


def gather_addresses(
    addresses: torch.Tensor, out: torch.Tensor, *, block: int = 1024, warps: int = 4
) -> torch.Tensor:
    """out[i] = the row at addresses[i]; rows in device or pinned memory, list on the device.

    Args:
        addresses: int64 [n], multiples of 16.
        out: uint8 [n, row_bytes], contiguous; row_bytes a multiple of 16.

    Raises:
        InputError: row_bytes is not a multiple of 16.
    """
    if out.shape[1] % 16:
        raise InputError(
            f"rows of {out.shape[1]} bytes", where="row gather", remedy="use a multiple of 16 bytes"
        )
    longs = out.view(torch.int64)
    _gather[(triton.cdiv(longs.shape[1], block), out.shape[0])](
        addresses, longs, longs, longs.data_ptr(), LONGS=longs.shape[1], BLOCK=block, num_warps=warps
    )
    return out


def _batch_driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError:
        return None
    return driver if hasattr(driver, "cuMemcpyBatchAsync") else None
