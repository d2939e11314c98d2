"""Packed INT8 projections with q38's kernels: the scales keep their float16, and few tokens take the GEMV.

SGLang's own method for them repacks the words for Marlin and rounds the scales to the model's dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from q38.base.errors import InputError
from q38.kernels.int8_matmul import Int8Matrix
from q38.sglang_ext.unpacked_linear import UnpackedLinearMethod


class Int8LinearMethod(UnpackedLinearMethod):
    """Parameters as in the checkpoint; words and scales stay as they are.

    Raises:
        InputError: not 8 bits, or not symmetric.
    """

    def __init__(self, bits: int, group_size: int, sym: bool, prefix: str) -> None:
        super().__init__(bits, group_size, sym, prefix)
        if bits != 8:
            raise InputError(
                f"packed at {bits} bits, the kernels take 8", where=prefix, remedy="quantize it to 8 bits"
            )

    scale_dtype = torch.float16

    def process_weights_after_loading(self, layer: Any) -> None:
        """Drop the zero points, which are all alike, and compile."""
        delattr(layer, "qzeros")
        layer.int8_matrix = matrix = Int8Matrix(layer.qweight.data, layer.scales.data)
        matrix.warm_up(self.dtype)

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        out: torch.Tensor = layer.int8_matrix(x)
        return out if bias is None else out + bias
