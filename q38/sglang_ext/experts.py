"""SGLang's method for routed experts that lie in rows: nothing is registered, everything is found by address.

Rows are no parameters and no buffers: SGLang would allocate them all on the device, and stage them there again
after loading.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput
from sglang.srt.layers.quantization.base_config import FusedMoEMethodBase

from q38.base.errors import InputError
from q38.sglang_ext.expert_kernels import compile_decode, run
from q38.sglang_ext.residency import rows


class RowExpertsMethod(FusedMoEMethodBase):  # type: ignore[misc]
    """The routed experts of one layer.

    Args:
        bits, group_size: of the packing.
        prefix: the layer's name, for messages.
    """

    def __init__(self, bits: int, group_size: int, prefix: str) -> None:
        self.bits, self.group_size, self.prefix = bits, group_size, prefix
        self.layer_id = -1
        self.scaling = 1.0

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **_attributes: Any,
    ) -> None:
        """Check that rows can hold this layer, and allocate nothing.

        Raises:
            InputError: experts are split over devices or fused with a shared one, or a dtype that the kernels lack.
        """
        where = self.prefix
        if layer.moe_tp_size != 1 or layer.moe_ep_size != 1:
            raise InputError("experts in rows live on one device", where=where, remedy="serve with --tp 1")
        if layer.num_fused_shared_experts:
            raise InputError(
                "the shared expert is fused into the routed ones",
                where=where,
                remedy="pass --disable-shared-experts-fusion",
            )
        if params_dtype not in (torch.bfloat16, torch.float16):
            raise InputError(f"activations of {params_dtype}", where=where, remedy="use --dtype bfloat16")
        self.layer_id, self.top_k, self.dtype = layer.layer_id, layer.top_k, params_dtype
        self.device = torch.empty(0).device  # the model is built inside its device's context

    def create_moe_runner(self, layer: torch.nn.Module, moe_runner_config: Any) -> None:
        """Keep what of the configuration changes the result; there is no runner."""
        if moe_runner_config.activation != "silu":
            raise InputError(
                f"experts with {moe_runner_config.activation}",
                where=self.prefix,
                remedy="use a Qwen4-Exp model",
            )
        self.scaling = float(moe_runner_config.routed_scaling_factor or 1.0)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Compile the decode kernel; the rows are loaded by now. Later layers find it made."""
        if self.device.type == "cuda":
            compile_decode(rows(), self.top_k, self.dtype, self.device)

    def apply(self, layer: torch.nn.Module, dispatch_output: Any) -> Any:
        """x [M, hidden] -> the weighted sum of each token's experts, [M, hidden] of x's dtype."""
        x = dispatch_output.hidden_states
        routing = dispatch_output.topk_output
        ids, weights = routing.topk_ids.to(torch.int32), routing.topk_weights.to(torch.float32)  # [M, top_k]
        out = torch.empty_like(x) if not len(x) else run(rows(), self.layer_id, x.contiguous(), ids, weights)
        return StandardCombineInput(hidden_states=out if self.scaling == 1.0 else out * self.scaling)
