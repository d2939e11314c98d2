"""The mix of a hyper-connection with its two matrices in INT8: many streams become one.

    out = mean over branches b of sigmoid(up(silu(down(x) / branches)))[b] * x[b]

For at most 16 tokens two launches of the INT8 GEMV with what follows each product in its epilogue; else plain products.
Reference: `mix_reference`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from q38.kernels.gemv_int8 import COLUMNS, Epilogue, GemvInt8
from q38.kernels.gemv_int8_triton import MAX_TOKENS
from q38.kernels.int8_matmul import Int8Matrix

_BLOCK = 512  # channels of one program


class GatedMix:
    """One mix.

    Args:
        down: words int32 [branches * hidden / 4, rank] and scales 16-bit [groups, rank]; see gemv_int8.
        up: words int32 [rank / 4, branches * hidden] and scales, their columns in the order of `gate_columns`.
        branches: a divisor of 32.
    """

    def __init__(
        self, down: tuple[torch.Tensor, torch.Tensor], up: tuple[torch.Tensor, torch.Tensor], branches: int
    ) -> None:
        self.branches = branches
        self._many = Int8Matrix(*down), Int8Matrix(*up)
        self._few: tuple[GemvInt8, GemvInt8] | None = None
        if down[0].device.type == "cuda":
            few = (
                GemvInt8(*down, epilogue=Epilogue("silu", branches)),
                GemvInt8(*up, epilogue=Epilogue("gate", branches)),
            )
            if all(gemv.backend == "cuda" for gemv in few):
                self._few = few

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [M, branches * hidden] float16 or bfloat16 -> [M, hidden] of x's dtype."""
        if self._few is not None and 1 <= len(x) <= MAX_TOKENS:
            down, up = self._few
            x = x.contiguous()
            return up(down(x), streams=x)
        low = torch.nn.functional.silu(self._many[0].many(x) / self.branches)
        return gate(self._many[1].many(low), x, self.branches)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile for few tokens, before a graph is captured."""
        words = self._many[0].words
        for tokens in (1, MAX_TOKENS) if self._few is not None else ():
            self(torch.zeros(tokens, words.shape[0] * 4, dtype=dtype, device=words.device))


def gate(sums: torch.Tensor, x: torch.Tensor, branches: int) -> torch.Tensor:
    """Mean over branches of sigmoid(sums) * x, in float32.

    Args:
        sums: [M, branches * hidden], columns in the order of `gate_columns`. x: the same in natural order.

    Returns:
        [M, hidden] of x's dtype.
    """
    hidden, channels = x.shape[1] // branches, COLUMNS // branches
    if x.device.type != "cuda":
        gates = sums.view(-1, hidden // channels, branches, channels).transpose(1, 2).float().sigmoid()
        return (gates * x.view(gates.shape)).mean(1).view(-1, hidden).to(x.dtype)
    out = torch.empty(len(x), hidden, dtype=x.dtype, device=x.device)
    _gate[(len(x), triton.cdiv(hidden, _BLOCK))](
        sums, x, out, hidden, BRANCHES=branches, CHANNELS=channels, BLOCK=_BLOCK
    )
    return out


@triton.jit
def _gate(sums, x, out, hidden, BRANCHES: tl.constexpr, CHANNELS: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = channel < hidden
    first = token * BRANCHES * hidden
    total = tl.zeros((BLOCK,), tl.float32)
    for branch in tl.static_range(BRANCHES):
        at = (channel // CHANNELS) * (BRANCHES * CHANNELS) + branch * CHANNELS + channel % CHANNELS
        s = tl.load(sums + first + at, mask=live, other=0.0).to(tl.float32)
        v = tl.load(x + first + branch * hidden + channel, mask=live, other=0.0).to(tl.float32)
        total += v / (1.0 + tl.exp(-s))
    tl.store(out + token * hidden + channel, (total / BRANCHES).to(out.dtype.element_ty), mask=live)


def mix_reference(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int) -> torch.Tensor:
    """The same in float64 with plain matrices: down [branches * hidden, rank], up [rank, branches * hidden] in natural order."""
    low = torch.nn.functional.silu(x.double() @ down.double() / branches)
    gates = (low @ up.double()).sigmoid()  # [M, b * h]
    return (gates * x.double()).view(len(x), branches, -1).mean(1)
