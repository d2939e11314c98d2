"""The tensors of a checkpoint in one dtype, on one device, whatever the layout they are stored in.

A matrix lies there plain, in fp8 with a scale per block of weights, or packed; the experts of a block lie in
two 3-D tensors or one by one.
"""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import torch

from q38.base.errors import InputError
from q38.base.settings import cpu_count
from q38.checkpoint.fp8 import dequantize_blocks
from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import WORD, dequantize

PIECE = 16 * 2**20  # weights in hand at a time beside the result
MAX_THREADS = 8  # each holds a matrix while it is unpacked
_FUSED = re.compile(r"\.mlp\.experts\.(gate_up_proj|down_proj)$")
_INSPECT = "run q38 inspect on this directory"


class Matrices:
    """Reads tensors of `checkpoint` as `dtype` on `device`. Integer tensors keep their dtype."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._tensors = checkpoint.tensors

    def plain(self, name: str) -> torch.Tensor:
        """A tensor that is never packed."""
        tensor = self._checkpoint.read(name)
        return tensor.to(self._device, self._dtype if tensor.is_floating_point() else None)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Some rows of a plain matrix: int64 [n], ascending -> [n, K] on the CPU."""
        parts, wanted = [], ids.tolist()
        for first, last in _runs(wanted):
            parts.append(self._checkpoint.read_rows(name, first, last + 1))
        return torch.cat(parts).to(self._dtype)

    def matrix(self, module: str, n: int, k: int) -> torch.Tensor:
        """The weight [n, k] of a linear module."""
        out = torch.empty(n, k, dtype=self._dtype, device=self._device)
        self._fill(out, module)
        return out

    def experts(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """All experts of a block, stacked: "...mlp.experts.gate_up_proj" [E, 2 I, H] or "down_proj" [E, H, I]."""
        out = torch.empty(shape, dtype=self._dtype, device=self._device)
        if name in self._tensors:
            step = max(1, PIECE // (shape[1] * shape[2]))
            for start in range(0, shape[0], step):
                out[start : start + step] = self._checkpoint.read_rows(
                    name, start, min(start + step, shape[0])
                )
            return out
        work = [
            (out[expert, part], module)
            for expert in range(shape[0])
            for module, part in _members(name, expert, shape[1])
        ]
        # Thousands of small matrices: torch's own threads gain nothing inside one, so they are spread over threads.
        with ThreadPoolExecutor(max_workers=min(cpu_count(), MAX_THREADS)) as pool:
            for _ in pool.map(lambda one: self._fill_in_thread(*one), work):
                pass
        return out

    def require(self, name: str, shape: tuple[int, ...]) -> None:
        """Refuse a tensor that is missing or of another shape.

        Raises:
            InputError: names it.
        """
        module = name.removesuffix(".weight")
        packed = self._tensors.get(f"{module}.qweight")
        if packed is not None and module != name:
            for part in ("qzeros", "scales"):
                self._checkpoint.info(f"{module}.{part}")
            found: tuple[int, ...] = (packed.shape[1], packed.shape[0] * WORD // self._bits(module))
        else:
            info = self._checkpoint.info(name)
            found = info.shape
            if info.dtype == "F8_E4M3":
                self._checkpoint.info(f"{module}.weight_scale_inv")
        if found != shape:
            raise InputError(
                f"tensor {name} has shape {list(found)}, the model wants {list(shape)}",
                where=self._checkpoint.path,
                remedy=_INSPECT,
            )

    def require_expert(self, name: str, expert: int, shape: tuple[int, ...]) -> None:
        """The same for one expert [N, K] of "...mlp.experts.gate_up_proj" or "down_proj"."""
        info = self._tensors.get(name)
        if info is not None:
            if expert >= info.shape[0] or info.shape[1:] != shape:
                raise InputError(
                    f"tensor {name} has shape {list(info.shape)}, the model wants {list(shape)} for expert {expert}",
                    where=self._checkpoint.path,
                    remedy=_INSPECT,
                )
            return
        for module, part in _members(name, expert, shape[0]):
            self.require(f"{module}.weight", (len(range(shape[0])[part]), shape[1]))

    def _fill_in_thread(self, out: torch.Tensor, module: str) -> None:
        with (
            torch.inference_mode()
        ):  # a state of each thread, without which a tensor of the caller's may be read-only
            self._fill(out, module)

    def _fill(self, out: torch.Tensor, module: str) -> None:
        """Write the weight of a linear module into `out` [N, K], in pieces of rows."""
        checkpoint, name = self._checkpoint, f"{module}.weight"
        n, k = out.shape
        if f"{module}.qweight" in self._tensors:
            bits = self._bits(module)
            words, zeros, scales = (
                checkpoint.read(f"{module}.{part}").to(self._device)
                for part in ("qweight", "qzeros", "scales")
            )
            for start, stop in _pieces(n, k):
                out[start:stop] = dequantize(
                    words[:, start:stop].contiguous(),
                    zeros[:, start * bits // WORD : stop * bits // WORD].contiguous(),
                    scales[:, start:stop].contiguous(),
                    bits,
                )
        elif f"{module}.weight_scale_inv" in self._tensors:
            codes, block = checkpoint.read(name), checkpoint.read(f"{module}.weight_scale_inv")
            out.copy_(dequantize_blocks(codes.to(self._device), block.to(self._device)))
        else:
            for start, stop in _pieces(n, k):
                out[start:stop] = checkpoint.read_rows(name, start, stop)

    def _bits(self, module: str) -> int:
        zeros, scales = (self._checkpoint.info(f"{module}.{part}") for part in ("qzeros", "scales"))
        return zeros.shape[1] * WORD // scales.shape[1]  # zeros are packed along N, so they tell the width


def _members(name: str, expert: int, rows: int) -> list[tuple[str, slice]]:
    """The per-expert modules that a stacked tensor is made of, and their rows in it."""
    match = _FUSED.search(name)
    assert match is not None, name
    prefix = f"{name[: match.start()]}.mlp.experts.{expert}."
    if match[1] == "down_proj":
        return [(prefix + "down_proj", slice(0, rows))]
    return [
        (prefix + "gate_proj", slice(0, rows // 2)),
        (prefix + "up_proj", slice(rows // 2, rows)),
    ]


def _pieces(n: int, k: int) -> list[tuple[int, int]]:
    """Ranges of rows on whole words of the zeros, about PIECE weights each."""
    step = max(PIECE // k // WORD, 1) * WORD
    return [(start, min(start + step, n)) for start in range(0, n, step)]


def _runs(ids: list[int]) -> list[tuple[int, int]]:
    """Ascending ids as (first, last) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for i in ids:
        if runs and i == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], i)
        else:
            runs.append((i, i))
    return runs
