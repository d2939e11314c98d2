"""The shared expert joins the routed ones through a CUDA kernel, for as few tokens as a decode step has.

SGLang's dual streams have joined by then: its Triton kernel, which this replaces, runs after the join too. A CPU never
comes here; more than 16 tokens and sizes that the kernel does not take stay SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.kernels import nvrtc
from q38.kernels.shared_tail import MAX_TOKENS, add_shared, unsupported
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import ELEMENTWISE


def hooks() -> list[Hook]:
    """See hooks.apply. Not the function around it: the CPU engine has a hook there, and a target takes one plugin's."""
    return [Hook(ELEMENTWISE + "._launch_fused_gate_sigmoid_mul", "around", add_gated)]


def add_gated(
    original: Callable[..., Any],
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    output: torch.Tensor,
    *,
    do_add: bool,
) -> None:
    """output [M, hidden] += sigmoid(hidden_states . gate_weight) * shared_output."""
    if do_add and fits(hidden_states, gate_weight, shared_output, output):
        add_shared(hidden_states, gate_weight, shared_output, output)
    else:
        original(hidden_states, gate_weight, shared_output, output, do_add=do_add)


def fits(x: torch.Tensor, weight: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> bool:
    """Whether the kernel takes this call."""
    return (
        x.is_cuda
        and x.ndim == 2
        and 1 <= len(x) <= MAX_TOKENS
        and x.shape == shared.shape == routed.shape
        and weight.shape == x.shape[1:]
        and all(t.dtype == x.dtype and t.is_contiguous() for t in (x, weight, shared, routed))
        and unsupported(x.shape[1], x.dtype) is None
        and not torch.compiler.is_compiling()
        and nvrtc.available() is None
    )
