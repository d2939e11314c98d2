"""Forward and backward of a batch of experts, each on rows of its own, as batched products.

y = down(silu(gate(x)) * up(x)), with gate and up in one matrix. Written out instead of left to autograd:
nothing but the two gradients of the matrices is wanted, and nothing needs to be kept beside what is here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional


class Pass(NamedTuple):
    """output [E, M, H]; gate_up [E, M, 2 I] before the activation; active [E, M, I] after it."""

    output: torch.Tensor
    gate_up: torch.Tensor
    active: torch.Tensor


def activate(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up: [..., 2 I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def forward(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Pass:
    """x [E, M, H], gate_up [E, 2 I, H], down [E, H, I]."""
    hidden = torch.bmm(x, gate_up.mT)
    active = activate(hidden)
    return Pass(torch.bmm(active, down.mT), hidden, active)


def gradients(
    x: torch.Tensor, done: Pass, down: torch.Tensor, output_gradient: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of gate_up [E, 2 I, H] and down [E, H, I] for a gradient of the output [E, M, H]."""
    for_down = torch.bmm(output_gradient.mT, done.active)
    inner = torch.bmm(output_gradient, down)  # [E, M, I]
    gate, up = done.gate_up.chunk(2, dim=-1)
    sigmoid = torch.sigmoid(gate)
    for_gate = inner * up * sigmoid * (1 + gate * (1 - sigmoid))
    for_hidden = torch.cat([for_gate, inner * (gate * sigmoid)], dim=-1)
    return torch.bmm(for_hidden.mT, x), for_down
