"""INT8 matrix times at most 16 vectors, for wide and short matrices (hyper-connections, routers).

CUDA where NVRTC is there and the sizes fit (gemv_int8.cu), else Triton (gemv_int8_triton.py).

The matrix is packed as AutoRound packs 8 bits: word kw of column n holds inputs 4 kw .. 4 kw + 3, a
weight is (code - 128) * scale, scales signed, one per group of inputs and column. The CUDA kernel multiplies
exact codes and scales the fp32 sum of each group. Equal inputs give equal bits, and a token's bits do not
depend on the tokens beside it.
Reference: q38.kernels.reference.gemv_int8.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from q38.base.errors import InputError, ResourceError
from q38.kernels import nvrtc
from q38.kernels.gemv_int8_triton import MAX_TOKENS, TritonGemv, TritonInt8Config

COLUMNS = 32  # of one block, as in the source
SOURCE = Path(__file__).with_name("gemv_int8.cu")
Backend = Literal["auto", "cuda", "triton"]


@dataclass(frozen=True)
class Int8Config:
    """Launch geometry of the CUDA kernel.

    warps: of a block, at most 20 (their sums fit in 48 KiB).
    split: blocks that share the inputs of 32 columns.
    """

    warps: int = 8
    split: int = 1


@dataclass(frozen=True)
class Epilogue:
    """What the CUDA kernel makes of the sums while it has them.

    kind: "silu": silu(sum / branches). "gate": the mean over `branches` streams of sigmoid(sum) * stream, where
        `gate_columns` has put the columns in order.
    """

    kind: Literal["silu", "gate"]
    branches: int


def gate_columns(n: int, branches: int) -> torch.Tensor:
    """int64 [n]: the column of the matrix that comes at each place, so that all branches of a channel share a block."""
    channels = COLUMNS // branches
    return torch.arange(n).view(branches, n // branches // channels, channels).transpose(0, 1).reshape(-1)


def default_config(k: int, n: int, group: int) -> Int8Config:
    """A geometry that suits any card: a group a warp; a long input is shared by blocks when the matrix is narrow."""
    groups = k // group
    if groups <= 20:
        return Int8Config(groups, 1)
    return Int8Config(8, max(1, min(-(-groups // 8), 320 * COLUMNS // n)))


class GemvInt8:
    """x @ dequantize(words, scales) for one matrix; scratch is made once, so calls can be captured.

    A kernel is compiled at the first call with up to 8 tokens and with more: call once before capturing.

    Args:
        words: int32 [K / 4, N], contiguous.
        scales: float16 or bfloat16 [K / group, N], contiguous.
        config: geometry; that of the Triton kernel makes "auto" take Triton. Absent: default_config.
        epilogue: for the CUDA backend.
        backend: "auto" takes CUDA where it can run these sizes.

    Raises:
        InputError: shapes that do not belong together.
        ResourceError: the CUDA backend was asked for and cannot run here.
    """

    def __init__(
        self,
        words: torch.Tensor,
        scales: torch.Tensor,
        *,
        config: Int8Config | TritonInt8Config | None = None,
        backend: Backend = "auto",
        epilogue: Epilogue | None = None,
    ) -> None:
        k, n = words.shape[0] * 4, words.shape[1]
        if (
            words.dtype != torch.int32
            or scales.shape[1] != n
            or k % scales.shape[0]
            or k // scales.shape[0] % 4
        ):
            raise InputError(
                f"words {words.dtype} {list(words.shape)} with scales {list(scales.shape)}",
                where="INT8 GEMV",
                remedy="pack the matrix as AutoRound does, at 8 bits",
            )
        self.words, self.scales, self.k, self.n, self.epilogue = words, scales, k, n, epilogue
        self.group = k // scales.shape[0]
        triton = config if isinstance(config, TritonInt8Config) else None
        self.config = config if isinstance(config, Int8Config) else default_config(k, n, self.group)
        reason = unsupported(n, self.group) or (
            "no CUDA device" if words.device.type != "cuda" else nvrtc.available()
        )
        if backend == "cuda" and reason:
            raise ResourceError(reason, where="INT8 GEMV", remedy="use the Triton backend")
        self.backend = "triton" if triton or backend == "triton" or reason else "cuda"
        if self.backend == "triton":
            self._triton = TritonGemv(words, scales, triton or TritonInt8Config())
        else:
            rows = self.config.split * MAX_TOKENS if self.config.split > 1 else 1
            self._partial = torch.empty(rows, n, dtype=torch.float32, device=words.device)
            self._tickets = torch.zeros(n // COLUMNS, dtype=torch.int32, device=words.device)
            self._dependent = nvrtc.takes_dependent(words.device)

    def __call__(
        self, x: torch.Tensor, out: torch.Tensor | None = None, *, streams: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [M, K] float16 or bfloat16, M at most 16 -> [M, N] of x's dtype.

        streams: for a gate, [M, N] of x's dtype; the result is [M, N / branches] then.
        """
        if x.ndim != 2 or x.shape[1] != self.k or not 1 <= x.shape[0] <= MAX_TOKENS or not x.is_contiguous():
            raise InputError(
                f"x is {list(x.shape)}, the matrix takes {self.k} inputs and at most {MAX_TOKENS} rows",
                where="INT8 GEMV",
                remedy="use a matrix product for more rows",
            )
        if out is None:
            gate = self.epilogue is not None and self.epilogue.kind == "gate"
            width = self.n // self.epilogue.branches if self.epilogue and gate else self.n
            out = torch.empty(x.shape[0], width, dtype=x.dtype, device=x.device)
        if self.backend == "triton":
            self._triton(x, out)
        else:
            self._launch(x, out, x if streams is None else streams)
        return out

    def _launch(self, x: torch.Tensor, out: torch.Tensor, streams: torch.Tensor) -> None:
        c, e = self.config, self.epilogue
        constants = defines(self.k, self.n, self.group, c, x.shape[0], x.dtype, self.scales.dtype, epilogue=e)
        (gemv,) = nvrtc.load_kernels(SOURCE, constants, ("gemv",))
        gemv.launch(
            (self.n // COLUMNS, c.split),
            32 * c.warps,
            (x, self.words, self.scales, out, self._partial, self._tickets, streams, x.shape[0]),
            stream=torch.cuda.current_stream(x.device).cuda_stream,
            dependent=self._dependent,
        )


def defines(
    k: int,
    n: int,
    group: int,
    config: Int8Config,
    tokens: int,
    dtype: torch.dtype,
    scale_dtype: torch.dtype,
    *,
    epilogue: Epilogue | None = None,
) -> dict[str, int]:
    """The source's compile-time constants."""
    return {
        "INPUTS": k,
        "OUTPUTS": n,
        "GROUP": group,
        "TOKENS": 8 if tokens <= 8 else MAX_TOKENS,
        "WARPS": config.warps,
        "SPLIT": config.split,
        "SCALE_BF16": int(scale_dtype == torch.bfloat16),
        "ACT_BF16": int(dtype == torch.bfloat16),
        "EPILOGUE": 0 if epilogue is None else {"silu": 1, "gate": 2}[epilogue.kind],
        "BRANCHES": 1 if epilogue is None else epilogue.branches,
    }


def unsupported(n: int, group: int) -> str | None:
    """Why the CUDA kernel cannot take these sizes, or None."""
    if group % 32 or group > 128:
        return f"groups of {group}, not of 32, 64, 96 or 128"
    return f"{n} columns, not a multiple of {COLUMNS}" if n % COLUMNS else None
