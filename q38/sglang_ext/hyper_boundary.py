"""Decode steps cross the boundary between two blocks in one launch: gates, combine and the next norm.

SGLang takes three. Left to it: more than 16 tokens, sizes and dtypes that the kernel does not take, CPUs, and compute
capability 10 where its own mix has brought the gates along.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.kernels import nvrtc
from q38.kernels.hyper_boundary import MAX_TOKENS, Norm, cross, gate_parts, unsupported
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import HYPER

_NEXT = "q38_inject"  # on a norm: whose gates its result is read by, a pair (linear layer or None,)
_PARTS = "q38_parts"  # on a normalized tensor: the sums that its gates are made of


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(HYPER + ".GatedResidual.__init__", "after", remember_gates),
        Hook(HYPER + ".GatedResidual.combine_and_normalize", "around", combine_and_normalize),
    ]


def remember_gates(_result: None, self: Any, *_args: Any, **_kwargs: Any) -> None:
    """Let a norm know the gates that read what it normalizes; in a tuple, so that it does not become their parent."""
    setattr(self.hc_norm, _NEXT, (getattr(self, "block_inject_weight", None),))


def combine_and_normalize(
    original: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    self: Any,
    block_output: torch.Tensor,
    residuals: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    next_norm: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The streams with a block's output [M, branches * hidden], and what `next_norm` makes of them.

    The sums of the next gates travel on the normalized tensor. Where it has none (it was normalized by SGLang, or is a
    slice), they are computed here.
    """
    if not fits(self, block_output, residuals, next_norm):
        return original(self, block_output, residuals, next_norm)
    streams, normed, _ = residuals
    parts = getattr(normed, _PARTS, None)
    if parts is None:
        parts = gate_parts(normed, self.block_inject_weight.weight.data)
    if next_norm is None:
        return cross(block_output, streams, parts).combined, None
    norm = Norm(next_norm.weight.data, float(next_norm.variance_epsilon))
    following = getattr(next_norm, _NEXT, (None,))[0]
    inject = None if following is None else following.weight.data
    crossed = cross(block_output, streams, parts, norm=norm, inject=inject)
    if crossed.parts is not None:
        setattr(crossed.normed, _PARTS, crossed.parts)
    return crossed.combined, crossed.normed


def fits(
    self: Any,
    block_output: torch.Tensor,
    residuals: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    next_norm: Any,
) -> bool:
    """Whether the kernels take this call."""
    streams, normed, others_parts = residuals
    weights = [self.block_inject_weight.weight]
    if next_norm is not None:
        following = getattr(next_norm, _NEXT, (None,))[0]
        weights += [next_norm.weight, *([] if following is None else [following.weight])]
    tensors = [block_output, streams, normed, *weights]
    return (
        others_parts is None
        and block_output.is_cuda
        and block_output.ndim == 2
        and 1 <= len(block_output) <= MAX_TOKENS
        and all(t.dtype == block_output.dtype and t.is_contiguous() for t in tensors)
        and normed.shape == streams.shape == (len(block_output), self.hc_count * self.hidden_size)
        and (next_norm is None or next_norm.group_size == self.hidden_size)
        and unsupported(self.hidden_size, self.hc_count, block_output.dtype) is None
        and not torch.compiler.is_compiling()
        and nvrtc.available() is None
    )
