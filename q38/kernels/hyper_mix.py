"""The mix of a hyper-connection with its matrices as they are, for at most 16 tokens: many streams become one.

    low[m]    = silu(down x[m] / branches)
    out[m, c] = mean over streams s of sigmoid(up low[m])[s, c] * x[m, s, c]

Two launches (hyper_mix.cu), in place of a grid that waits for itself. Both have their weights on the way before the
kernel in front of them has ended. Sums are float32; low and out are rounded to x's dtype. Equal inputs give equal bits,
and a token's bits do not depend on the tokens beside it.

Reference: `mix_reference`, `mix_rounded`. Source of the formula: GatedResidual and fused_hc_mix of SGLang. The same with
INT8 matrices: gated_mix.py.
"""

from __future__ import annotations

from pathlib import Path

import torch

from q38.base.errors import InputError
from q38.kernels import nvrtc

MAX_TOKENS = 16
SOURCE = Path(__file__).with_name("hyper_mix.cu")
_STEP = 32  # inputs that four lanes load at once
_ROWS = 8  # outputs of a block of the first launch
_WARPS = 8  # of such a block, which share its inputs
_STEPS = 8  # of such a warp, whose weights fit into registers
_CHANNELS = 16  # of a block of the second launch
_MOST_BRANCHES = 8
_LARGEST_RANK = 512  # a row of the second matrix, in registers
_LARGEST_WIDTH = 16 * _WARPS * _STEPS * _STEP  # 16 parts of the first sums


def mix(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int) -> torch.Tensor:
    """One mix. Kernels are compiled at the first call with up to 8 tokens and with more: call once before capturing.

    Args:
        x: [M, branches * hidden] float16 or bfloat16, contiguous, M from 1 to 16: the normalized streams.
        down: [rank, branches * hidden] of that dtype, contiguous.
        up: [branches * hidden, rank] of that dtype, contiguous.

    Returns:
        [M, hidden] of x's dtype.

    Raises:
        InputError: tensors that do not belong together, or sizes that `unsupported` names.
        ResourceError: there is no GPU or no NVRTC.
    """
    if (reason := refusal(x, down, up, branches)) is not None:
        raise InputError(
            reason,
            where="hyper-connections",
            remedy=f"give at most {MAX_TOKENS} contiguous rows and matrices of their dtype",
        )
    m, width = x.shape
    hidden, rank, split = width // branches, len(down), parts(width)
    partial = torch.empty(split, m, rank, dtype=torch.float32, device=x.device)
    out = torch.empty(m, hidden, dtype=x.dtype, device=x.device)
    constants = defines(hidden, branches, rank, m, x.dtype)
    first, second = nvrtc.load_kernels(SOURCE, constants, ("mix_down", "mix_up"))
    where = nvrtc.in_order(x.device)
    first.launch((rank // _ROWS, split), 32 * _WARPS, (x, down, partial, m), **where)
    threads = 32 * branches * (_CHANNELS // _ROWS)
    second.launch((hidden // _CHANNELS, 1), threads, (x, up, partial, out, m), **where)
    return out


def refusal(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int) -> str | None:
    """Why the kernels cannot take these tensors, or None; what device they are on is not looked at."""
    if x.ndim != 2 or not 1 <= len(x) <= MAX_TOKENS or branches < 1 or x.shape[1] % branches:
        return f"{branches} streams in {list(x.shape)}, not of 1 to {MAX_TOKENS} tokens"
    width, rank = x.shape[1], down.shape[0]
    if down.shape != (rank, width) or up.shape != (width, rank):
        return f"matrices {list(down.shape)} and {list(up.shape)} for streams {list(x.shape)}"
    if any(t.dtype != x.dtype or not t.is_contiguous() or t.data_ptr() % 16 for t in (x, down, up)):
        return f"rows and matrices that are not all of {x.dtype}, contiguous and aligned to 16 bytes"
    return unsupported(width // branches, branches, rank, x.dtype)


def unsupported(hidden: int, branches: int, rank: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these sizes, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations of {dtype}"
    if not 1 <= branches <= _MOST_BRANCHES:
        return f"{branches} streams, not 1 to {_MOST_BRANCHES}"
    width = hidden * branches
    if hidden % _CHANNELS or width % _STEP or not 0 < width <= _LARGEST_WIDTH:
        return f"{branches} streams of {hidden} channels, not of a multiple of {_CHANNELS}, together of {_STEP} up to {_LARGEST_WIDTH}"
    if rank % _STEP or not 0 < rank <= _LARGEST_RANK:
        return f"a rank of {rank}, not a multiple of {_STEP} up to {_LARGEST_RANK}"
    return None


def parts(width: int) -> int:
    """Into how many parts the first launch divides its inputs, each for a block: as few as registers allow."""
    return -(-width // (_STEP * _WARPS * _STEPS))


def defines(hidden: int, branches: int, rank: int, tokens: int, dtype: torch.dtype) -> dict[str, int]:
    """The source's compile-time constants."""
    return {
        "HIDDEN": hidden,
        "BRANCHES": branches,
        "RANK": rank,
        "TOKENS": 8 if tokens <= 8 else MAX_TOKENS,
        "SPLIT": parts(hidden * branches),
        "ACT_BF16": int(dtype == torch.bfloat16),
        "SCALE_BF16": 0,
    }


def mix_reference(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int) -> torch.Tensor:
    """`mix` in float64 without rounding: [M, hidden] float64."""
    low = torch.nn.functional.silu(x.double() @ down.double().T / branches)  # [M, rank]
    return _gate(low, x, up, branches)


def mix_rounded(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int) -> torch.Tensor:
    """`mix` in float64, rounded where the kernels round: [M, hidden] of x's dtype."""
    low = torch.nn.functional.silu(x.double() @ down.double().T / branches).to(x.dtype)
    return _gate(low, x, up, branches).to(x.dtype)


def _gate(low: torch.Tensor, x: torch.Tensor, up: torch.Tensor, branches: int) -> torch.Tensor:
    gates = (low.double() @ up.double().T).sigmoid()  # [M, s * h]
    return (gates * x.double()).view(len(x), branches, -1).mean(1)
