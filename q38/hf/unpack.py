"""AutoRound's packed modules as plain matrices."""

from __future__ import annotations

import torch
from torch import nn

from q38.checkpoint.index import Checkpoint
from q38.checkpoint.packing import WORD, dequantize


def unpack_linears(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace every packed module by an nn.Linear of `dtype`, in place. Returns how many.

    The weights are (code - zero) * scale in float32, rounded once.
    """
    packed = [(name, module) for name, module in model.named_modules() if hasattr(module, "qweight")]
    for name, module in packed:
        qweight, qzeros, scales = module.qweight, module.qzeros, module.scales
        assert isinstance(qweight, torch.Tensor) and isinstance(qzeros, torch.Tensor)
        assert isinstance(scales, torch.Tensor)
        bits = qzeros.shape[1] * 32 // scales.shape[1]
        weight = dequantize(qweight, qzeros, scales, bits).to(dtype)  # [N, K]
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, linear)
    return len(packed)


def unpacked_bytes(checkpoint: Checkpoint, item: int) -> int:
    """Bytes of all packed matrices once unpacked to `item` bytes a weight."""
    total = 0
    for info in checkpoint.tensors.values():
        zeros = checkpoint.tensors.get(info.name.removesuffix(".qweight") + ".qzeros")
        if info.name.endswith(".qweight") and zeros is not None:
            bits = zeros.shape[1] * WORD // info.shape[1]
            total += info.numel * WORD // bits * item
    return total
