"""How many experts are tuned at once: as many as the free memory of the device holds.

With P weights an expert (three matrices), b bytes a value in the compute dtype (2 on CUDA, 4 on the CPU), n the
tokens an expert is tuned on at most, m the rows of a step, H and I the sizes of the model:

    bytes of an expert = P (3 b + 2 + method) + n H b + m (16 H + 20 I) + 8 m steps
        3 b     source weight, quantized weight, gradient
        2       levels now and at the best step
        method  expert-local: 4 (shift).  expert-local-gsq: 16 + 4 b (four logits, their momenta), and 20 more on
                the CPU, which keeps the chances of the last draw
        n H b   what the source's expert makes of its tokens
        m (..)  the rows of a step: inputs, both activations, outputs and their gradients
        8 m st. which token each row of each step is
    once               = T H b + 16 k T + reserve, T tokens of calibration, k experts per token:
                         the experts' inputs, and the routing; the reserve is for GPTQ's Hessians and the libraries
    experts at once    = (9/10 free - once) / bytes of an expert, at least 1, at most an even share of each device
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from q38.base.errors import ResourceError
from q38.base.units import format_bytes
from q38.quantize.local.settings import Settings

RESERVE_CUDA = 3 * 2**30
RESERVE_CPU = 2**29
_SHARE = 0.9


@dataclass(frozen=True)
class Sizes:
    """What the formula takes from the model and the calibration text: see the module."""

    hidden: int
    intermediate: int
    experts: int
    per_token: int
    tokens: int

    @property
    def weights(self) -> int:
        """Weights of one expert."""
        return 3 * self.hidden * self.intermediate


def expert_bytes(sizes: Sizes, settings: Settings, *, cuda: bool) -> int:
    """Bytes of one expert while it is tuned."""
    b = 2 if cuda else 4
    method = 16 + 4 * b + (0 if cuda else 20) if settings.method == "expert-local-gsq" else 4
    tokens = min(settings.most_tokens, sizes.tokens)
    return (
        sizes.weights * (3 * b + 2 + method)
        + tokens * sizes.hidden * b
        + settings.rows * (16 * sizes.hidden + 20 * sizes.intermediate)
        + 8 * settings.rows * settings.steps
    )


def fixed_bytes(sizes: Sizes, *, cuda: bool) -> int:
    """Bytes that do not depend on how many experts are tuned at once."""
    inputs = sizes.tokens * (sizes.hidden * (2 if cuda else 4) + 16 * sizes.per_token)
    return inputs + (RESERVE_CUDA if cuda else RESERVE_CPU)


def experts_at_once(sizes: Sizes, settings: Settings, free: int, *, cuda: bool, devices: int = 1) -> int:
    """The size of a batch, evened out over the batches of a block, of which every device gets as many.

    Raises:
        ResourceError: not one expert fits in `free` bytes.
    """
    fixed, each = fixed_bytes(sizes, cuda=cuda), expert_bytes(sizes, settings, cuda=cuda)
    fit = int(free * _SHARE - fixed) // each
    if fit < 1:
        needed = int((fixed + each) / _SHARE)
        raise ResourceError(
            f"tuning one expert takes {format_bytes(needed)}, {format_bytes(free)} are free:"
            f" {format_bytes(needed - free)} short",
            where="GPU memory" if cuda else "memory",
            remedy="lower calibration.samples, or take the method rtn",
        )
    batches = -(-sizes.experts // min(fit, sizes.experts))
    batches = -(-batches // devices) * devices
    return -(-sizes.experts // batches)


def free_bytes(device: torch.device) -> int:
    """What a device can still give this process: on CUDA with what torch has cached, and within the share of
    the card that torch.cuda.set_per_process_memory_fraction leaves it."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, total = torch.cuda.mem_get_info(device)
    reserved, used = torch.cuda.memory_reserved(device), torch.cuda.memory_allocated(device)
    others = total - free - reserved  # the CUDA context, and other processes
    return int(total * _fraction(device)) - others - used


def _fraction(device: torch.device) -> float:
    read = getattr(torch.cuda.memory, "get_per_process_memory_fraction", None)
    return 1.0 if read is None else float(read(device))
