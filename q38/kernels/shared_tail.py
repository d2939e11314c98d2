"""The shared expert joins the routed ones, for at most 16 tokens: routed += sigmoid(x . weight) * shared. One launch.

CUDA C++ (shared_tail.cu). All in float32, rounded once. A token's bits do not depend on the tokens beside it.
Reference: `tail_reference`. Source of the formula: Qwen2MoeSparseMoeBlock of SGLang and of transformers.
"""

from __future__ import annotations

from pathlib import Path

import torch

from q38.base.errors import InputError
from q38.kernels import nvrtc

MAX_TOKENS = 16
SOURCE = Path(__file__).with_name("shared_tail.cu")
_CHANNELS = 256  # of a warp
_LARGEST = 32 * _CHANNELS  # channels of a block


def add_shared(
    x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor
) -> torch.Tensor:
    """Add the gated output of the shared expert to `routed`, in place.

    A kernel is compiled at the first call: call once before capturing.

    Args:
        x: [M, hidden] float16 or bfloat16, contiguous: what the experts read; M from 1 to 16.
        weight: [hidden] of x's dtype: the gate's only row.
        shared, routed: as `x`.

    Raises:
        InputError: tensors that do not belong together, or sizes that `unsupported` names.
        ResourceError: there is no GPU or no NVRTC.
    """
    hidden = x.shape[-1]
    alike = all(t.shape == x.shape and t.dtype == x.dtype and t.is_contiguous() for t in (x, shared, routed))
    reason = unsupported(hidden, x.dtype)
    if reason or not (
        alike
        and x.ndim == 2
        and 1 <= len(x) <= MAX_TOKENS
        and weight.shape == (hidden,)
        and weight.dtype == x.dtype
        and weight.is_contiguous()
    ):
        raise InputError(
            reason
            or f"{list(x.shape)}, {list(weight.shape)}, {list(shared.shape)} and {list(routed.shape)} of {x.dtype}",
            where="shared expert",
            remedy=f"give at most {MAX_TOKENS} contiguous rows of one dtype",
        )
    (kernel,) = nvrtc.load_kernels(SOURCE, defines(hidden, x.dtype), ("shared_tail",))
    kernel.launch(
        (len(x), 1),
        hidden // 8,
        (x, weight, shared, routed),
        stream=torch.cuda.current_stream(x.device).cuda_stream,
        dependent=torch.cuda.get_device_capability(x.device)[0] >= 9,
    )
    return routed


def unsupported(hidden: int, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot take these sizes, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"activations of {dtype}"
    if hidden % _CHANNELS or not 0 < hidden <= _LARGEST:
        return f"{hidden} channels, not a multiple of {_CHANNELS} up to {_LARGEST}"
    return None


def defines(hidden: int, dtype: torch.dtype) -> dict[str, int]:
    """The source's compile-time constants."""
    return {"HIDDEN": hidden, "ACT_BF16": int(dtype == torch.bfloat16), "SCALE_BF16": 0}


def tail_reference(
    x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor
) -> torch.Tensor:
    """The same in float64, rounded once: [M, hidden] of x's dtype, out of place."""
    gate = (x.double() @ weight.double()).sigmoid()  # [M]
    return (routed.double() + gate[:, None] * shared.double()).to(routed.dtype)
