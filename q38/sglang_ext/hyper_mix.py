"""Decode steps take the mix of a hyper-connection in two launches, its matrices as SGLang loaded them.

In place of SGLang's kernel for few tokens, so everything that SGLang gives to another stays there: more than 16 tokens,
CPUs, deterministic inference, matrices in INT8, compute capability 10.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from q38.kernels import nvrtc
from q38.kernels.hyper_mix import mix, refusal
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import HC_MIX


def hooks() -> list[Hook]:
    """See hooks.apply. The registry also exchanges the name where SGLang's hyper-connections have imported it."""
    return [Hook(HC_MIX + ".fused_hc_mix", "around", mix_few)]


def mix_few(
    original: Callable[..., torch.Tensor],
    hyper_input_normed: torch.Tensor,
    w_down: torch.Tensor,
    w_up: torch.Tensor,
    hc: int,
    hs: int,
) -> torch.Tensor:
    """[M, hc * hs] -> [M, hs], both of the activations' dtype."""
    if fits(hyper_input_normed, w_down, w_up, hc, hs):
        return mix(hyper_input_normed, w_down, w_up, hc)
    return original(hyper_input_normed, w_down, w_up, hc, hs)


def fits(x: torch.Tensor, down: torch.Tensor, up: torch.Tensor, branches: int, hidden: int) -> bool:
    """Whether the kernels take this call."""
    return (
        x.is_cuda
        and not torch.compiler.is_compiling()
        and x.shape[-1] == branches * hidden
        and refusal(x, down, up, branches) is None
        and nvrtc.available() is None
    )
