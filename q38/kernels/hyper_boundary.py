"""Between two blocks of a model with hyper-connections: the output of one joins the streams, for the next they are normalized.

    gates[c]     = 2 sigmoid(sum over all streams of normed . inject[c] / branches)
    combined[c]  = streams[c] + gates[c] * output
    next_normed  = combined[c] * rsqrt(mean(combined[c]^2) + eps) * (1 + norm[c])

for at most 16 tokens in one launch, in place of three. The gates need all streams of a token, so a launch leaves to the
next one its sums: `parts` [M, branches (stream), branches (gate)] float32, of which gate c is the sum over the streams.

CUDA C++ (hyper_boundary.cu). Equal inputs give equal bits, and a token's bits do not depend on the tokens beside it.
Reference: `boundary_reference`. Source of the formulas: GatedResidual and GroupedGemmaRMSNorm of SGLang.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from q38.base.errors import InputError
from q38.kernels import nvrtc

MAX_TOKENS = 16
SOURCE = Path(__file__).with_name("hyper_boundary.cu")
_CHANNELS = 512  # of a warp
_LARGEST = 32 * _CHANNELS  # channels of a block
_MOST_BRANCHES = 8  # whose weights fit into registers


@dataclass(frozen=True)
class Norm:
    """Of the next block. weight: [branches * hidden], less one. eps: beside the mean square."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Boundary:
    """What a boundary leaves. None: was not asked for.

    combined, normed: [M, branches * hidden] of the activations' dtype.
    parts: float32 [M, branches, branches], for the gates of the boundary after.
    """

    combined: torch.Tensor
    normed: torch.Tensor | None
    parts: torch.Tensor | None


def gate_parts(normed: torch.Tensor, inject: torch.Tensor) -> torch.Tensor:
    """Sums of the gates for streams that no boundary has normalized; one launch.

    Args:
        normed: [M, branches * hidden] float16 or bfloat16, contiguous, M from 1 to 16.
        inject: [branches, branches * hidden] of that dtype, contiguous.

    Returns:
        float32 [M, branches, branches].

    Raises:
        InputError: tensors that do not belong together, or sizes that `unsupported` names.
        ResourceError: there is no GPU or no NVRTC.
    """
    branches = len(inject)
    hidden = _hidden(normed, branches, inject)
    parts = torch.empty(len(normed), branches, branches, dtype=torch.float32, device=normed.device)
    constants = defines(hidden, branches, normed.dtype, norm=False, gates=False)
    (kernel,) = nvrtc.load_kernels(SOURCE, constants, ("gate_parts",))
    kernel.launch(
        (len(normed), branches), hidden // 16, (normed, inject, parts), **nvrtc.in_order(normed.device)
    )
    return parts


def cross(
    output: torch.Tensor,
    streams: torch.Tensor,
    parts: torch.Tensor,
    *,
    norm: Norm | None = None,
    inject: torch.Tensor | None = None,
) -> Boundary:
    """One boundary, one launch. A kernel is compiled at the first call of its kind: call once before capturing.

    Args:
        output: [M, hidden] float16 or bfloat16, contiguous, M from 1 to 16: of the block that ends.
        streams: [M, branches * hidden] of that dtype, contiguous.
        parts: float32 [M, branches, branches], of the streams that this block's input was mixed from.
        norm: of the block that begins; None: combine only.
        inject: [branches, branches * hidden], of the block that begins; None: leave no sums for its gates.

    Raises:
        InputError, ResourceError: as `gate_parts`.
    """
    m, branches = len(output), parts.shape[-1]
    if inject is not None and norm is None:
        raise InputError(
            "gates without a norm", where="hyper-connections", remedy="give the norm of that block"
        )
    weights = [t for t in (norm.weight if norm else None, inject) if t is not None]
    hidden = _hidden(streams, branches, *weights)
    if output.shape != (m, hidden) or parts.shape != (m, branches, branches) or not output.is_contiguous():
        raise InputError(
            f"an output {list(output.shape)} and sums {list(parts.shape)} for streams {list(streams.shape)}",
            where="hyper-connections",
            remedy="give rows of the same tokens",
        )
    combined = torch.empty_like(streams)
    normed = torch.empty_like(streams) if norm else None
    following = torch.empty_like(parts) if inject is not None else None
    constants = defines(hidden, branches, streams.dtype, norm=norm is not None, gates=inject is not None)
    (kernel,) = nvrtc.load_kernels(SOURCE, constants, ("boundary",))
    unused = combined  # an address for what this kind of kernel does not touch
    kernel.launch(
        (m, branches),
        hidden // 16,
        (
            output,
            streams,
            parts,
            norm.weight if norm else unused,
            unused if inject is None else inject,
            combined,
            unused if normed is None else normed,
            unused if following is None else following,
            norm.eps if norm else 0.0,
        ),
        **nvrtc.in_order(streams.device),
    )
    return Boundary(combined, normed, following)


def unsupported(hidden: int, branches: int, dtype: torch.dtype) -> str | None:
    """Why the kernels cannot take these sizes, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations of {dtype}"
    if hidden % _CHANNELS or not 0 < hidden <= _LARGEST:
        return f"{hidden} channels, not a multiple of {_CHANNELS} up to {_LARGEST}"
    return None if 1 <= branches <= _MOST_BRANCHES else f"{branches} streams, not 1 to {_MOST_BRANCHES}"


def defines(hidden: int, branches: int, dtype: torch.dtype, *, norm: bool, gates: bool) -> dict[str, int]:
    """The source's compile-time constants."""
    return {
        "HIDDEN": hidden,
        "BRANCHES": branches,
        "NORM": int(norm),
        "GATES": int(gates),
        "ACT_BF16": int(dtype == torch.bfloat16),
        "SCALE_BF16": 0,
    }


def _hidden(streams: torch.Tensor, branches: int, *weights: torch.Tensor) -> int:
    """Channels of a stream, of tensors that belong together."""
    width = streams.shape[-1]
    hidden = width // max(branches, 1)
    fit = all(
        t.shape[-1] == width and t.dtype == streams.dtype and t.is_contiguous() for t in (streams, *weights)
    )
    reason = unsupported(hidden, branches, streams.dtype)
    if (
        reason
        or not fit
        or streams.ndim != 2
        or not 1 <= len(streams) <= MAX_TOKENS
        or hidden * branches != width
    ):
        raise InputError(
            reason
            or f"streams {list(streams.shape)} of {streams.dtype}, weights {[list(w.shape) for w in weights]}",
            where="hyper-connections",
            remedy=f"give at most {MAX_TOKENS} contiguous rows and weights of their dtype",
        )
    return hidden


def parts_reference(normed: torch.Tensor, inject: torch.Tensor) -> torch.Tensor:
    """`gate_parts` in float64: [M, branches, branches]."""
    branches = len(inject)
    n = normed.double().view(len(normed), branches, -1)  # [M, s, h]
    return torch.einsum("msh,csh->msc", n, inject.double().view(branches, branches, -1))


def boundary_reference(
    output: torch.Tensor,
    streams: torch.Tensor,
    parts: torch.Tensor,
    *,
    norm: Norm | None = None,
    inject: torch.Tensor | None = None,
) -> Boundary:
    """`cross` in float64, rounded where the kernel rounds: the combined streams, the normalized ones."""
    m, branches = len(output), parts.shape[-1]
    gates = 2 * (parts.double().sum(1) / branches).sigmoid()  # [M, c]
    x = streams.double().view(m, branches, -1) + gates[..., None] * output.double()[:, None]  # [M, c, h]
    combined = x.to(streams.dtype)
    normed = following = None
    if norm is not None:
        x = combined.double()
        x = (
            x
            * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
            * (1 + norm.weight.double().view(branches, -1))
        )
        normed = x.to(streams.dtype).view(m, -1)
        following = None if inject is None else parts_reference(normed, inject).float()
    return Boundary(combined.view(m, -1), normed, following)
