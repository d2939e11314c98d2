"""Packed projections that SGLang has no kernel for (on a CPU, all): unpacked once at load, then plain matrices."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.parameter import GroupQuantScaleParameter, PackedvLLMParameter
from sglang.srt.layers.quantization.base_config import LinearMethodBase

from q38.base.errors import InputError
from q38.kernels.reference import dequantize_words


class UnpackedLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """AutoRound's auto_gptq packing, symmetric: qweight int32 [K / codes, N], scales [K / group, N].

    It is its layer's `scheme` too: SGLang asks that for the loader to use.
    """

    requires_weight_loader_v2 = True
    scale_dtype = torch.float32

    def __init__(self, bits: int, group_size: int, sym: bool, prefix: str) -> None:
        if not sym:
            raise InputError("packed with zero points", where=prefix, remedy="quantize with sym: true")
        self.bits, self.group_size, self.codes = bits, group_size, 32 // bits

    def create_weights(
        self,
        layer: torch.nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **attributes: Any,
    ) -> None:
        """Parameters as the checkpoint has them."""
        k, n = input_size_per_partition, sum(output_partition_sizes)
        groups = k // (self.group_size if self.group_size > 0 else k)
        loader = attributes["weight_loader"]
        common = {"input_dim": 0, "output_dim": 1, "weight_loader": loader}
        packed = {**common, "packed_factor": self.codes}
        layer.register_parameter(
            "qweight",
            PackedvLLMParameter(
                data=torch.empty(k // self.codes, n, dtype=torch.int32), packed_dim=0, **packed
            ),
        )
        layer.register_parameter(
            "qzeros",
            PackedvLLMParameter(
                data=torch.empty(groups, n // self.codes, dtype=torch.int32), packed_dim=1, **packed
            ),
        )
        layer.register_parameter(
            "scales", GroupQuantScaleParameter(data=torch.empty(groups, n, dtype=self.scale_dtype), **common)
        )
        self.dtype = params_dtype

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Replace the packed parameters by `weight` [N, K]."""
        words, scales = layer.get_parameter("qweight").data, layer.get_parameter("scales").data
        weight = dequantize_words(words, scales, self.bits, torch.float32)  # [K, N]
        for name in ("qweight", "qzeros", "scales"):
            delattr(layer, name)
        matrix = weight.T.contiguous().to(self.dtype)
        layer.register_parameter("weight", torch.nn.Parameter(matrix, requires_grad=False))

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [..., K] -> [..., N]."""
        return torch.nn.functional.linear(x, layer.get_parameter("weight"), bias)
