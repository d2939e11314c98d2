"""Which method SGLang uses for each packed module: 2-bit experts lie in rows, the rest is SGLang's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.options import given
from q38.sglang_ext.targets import AUTOROUND

ROW_BITS = (2,)  # what the kernels read


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(AUTOROUND + ".get_quant_method", "around", get_quant_method)]


def get_quant_method(original: Callable[..., Any], self: Any, layer: torch.nn.Module, prefix: str) -> Any:
    """The method for one module of an AutoRound checkpoint."""
    method = choose(self, layer, prefix)
    return original(self, layer, prefix) if method is None else method


def choose(config: Any, layer: Any, prefix: str) -> Any:
    """q38's method for a module, or None where SGLang's own is to be used."""
    from sglang.srt.layers.linear import LinearBase
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
    from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead

    if isinstance(layer, FusedMoE):
        bits, group_size, _ = config.get_layer_config(layer, prefix)
        if bits in ROW_BITS:
            from q38.sglang_ext.experts import RowExpertsMethod

            return RowExpertsMethod(bits, group_size, prefix)
    elif isinstance(layer, LinearBase | ParallelLMHead) and (how := _dense()) != "sglang":
        bits, group_size, sym = config.get_layer_config(layer, prefix)
        if not config.check_quantized(bits):
            return _unquantized()
        if how == "int8" and bits == 8:
            from q38.sglang_ext.int8_linear import Int8LinearMethod as Method
        else:
            from q38.sglang_ext.unpacked_linear import UnpackedLinearMethod as Method
        layer.scheme = method = Method(bits, group_size, sym, prefix)
        return method
    return None


def _dense() -> str:
    """How packed projections are computed: see `options.DENSE`. On a CPU SGLang has no kernel for them."""
    from sglang.srt.runtime_context import get_server_args

    options = given()
    if get_server_args().device == "cpu":
        return "unpacked"
    return "sglang" if options is None else options.dense


def _unquantized() -> Any:
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod

    return UnquantizedLinearMethod()
