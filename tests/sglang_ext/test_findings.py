"""Faults that 2-bit experts met in SGLang, one test each: it fails where the fault is back.

Three of them (a buffer, a tied tensor and a view that stay behind when a parameter is offloaded) cannot arise because
nothing is offloaded: experts are no parameters, and every parameter stays on the device. That is what their tests see to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from q38.checkpoint.index import Checkpoint
from q38.serving import toolkit
from q38.serving.engines import ServeOptions
from q38.serving.sglang_engine import launch
from q38.serving.sglang_settings import SglangSettings
from q38.sglang_ext.expert_kernels import run
from q38.sglang_ext.options import ExtensionOptions
from q38.sglang_ext.residency import ExpertRows

if TYPE_CHECKING:
    from tests.sglang_ext.conftest import Child

AUTOROUND = "from sglang.srt.layers.quantization.auto_round import AutoRoundConfig\n"


@pytest.fixture
def arguments(tiny_packed: Path, tiny_ple: Path) -> list[str]:
    """What q38 serve gives SGLang on its command line."""
    settings = SglangSettings(device="cpu", context=1024)
    return launch(ServeOptions(tiny_packed, tiny_ple, port=7, sglang=settings)).command[3:]


@pytest.fixture
def config(tiny_packed: Path) -> str:
    """Code for the checkpoint's quantization configuration, as SGLang makes it."""
    found = json.loads((tiny_packed / "config.json").read_text())["quantization_config"]
    mapping = {"in_proj_ba": ["in_proj_b", "in_proj_a"]}
    return AUTOROUND + f"given = {found!r} | {{'packed_modules_mapping': {mapping!r}}}\nimport torch\n"


def test_finding_1_experts_of_2_bits_have_a_method(sglang_child: Child, config: str) -> None:
    code = (
        config
        + """
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
layer = object.__new__(FusedMoE)
torch.nn.Module.__init__(layer)
name = "model.language_model.layers.1.mlp.experts"
result = type(AutoRoundConfig.from_config(given).get_quant_method(layer, name)).__name__
"""
    )
    assert sglang_child.run(code) == "RowExpertsMethod"


def test_finding_2_a_renamed_layer_type_is_the_same_layer(sglang_child: Child, tiny_packed: Path) -> None:
    """transformers writes qwen_sparse_attention where the release has full_attention."""
    config = json.loads((tiny_packed / "config.json").read_text())
    config = config.get("text_config", config)
    kinds = [kind.replace("qwen_sparse_attention", "full_attention") for kind in config["layer_types"]]
    renamed = [kind.replace("full_attention", "qwen_sparse_attention") for kind in kinds]
    code = f"""
from sglang.srt.configs.qwen4_exp import Qwen4ExpTextConfig as Config
result = [list(Config(num_hidden_layers={len(kinds)}, layer_types=t).layers_block_type) for t in ({kinds!r}, {renamed!r})]
"""
    first, second = sglang_child.run(code)
    assert first == second
    assert set(first) == {"attention", "linear_attention"}


def test_finding_3_a_fused_projection_has_the_bits_of_its_parts(sglang_child: Child, config: str) -> None:
    """in_proj_b and in_proj_a stay bf16; in_proj_ba of SGLang must not fall under a broader entry."""
    code = (
        config
        + """
name = "model.language_model.layers.0.linear_attn.in_proj_"
entries = {name + "b": {"bits": 16}, name + "a": {"bits": 16}, r".*linear_attn\\.in_proj_.*": {"bits": 8}}
made = AutoRoundConfig.from_config(given | {"extra_config": entries})
result = [made.get_layer_config(torch.nn.Module(), name + part)[0] for part in ("b", "a", "ba")]
"""
    )
    assert sglang_child.run(code) == [16, 16, 16]


def test_finding_4_a_norms_second_buffer_follows_its_weight(sglang_child: Child) -> None:
    code = """
import torch
from sglang.srt.layers.layernorm import GemmaRMSNorm
norm = GemmaRMSNorm(4)
norm.weight.weight_loader(norm.weight, torch.arange(4.0))
result = [norm.gemma_weight.tolist(), norm.gemma_weight.device == norm.weight.device]
"""
    assert sglang_child.run(code) == [[1.0, 2.0, 3.0, 4.0], True]


def test_finding_5_no_parameter_is_offloaded_so_tied_ones_stay_tied(
    sglang_child: Child, arguments: list[str]
) -> None:
    """SGLang's offloaders replace parameters by functional_call, which stumbles over A_log under two names."""
    code = f"""
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils.offloader import get_offloader
made = prepare_server_args({arguments!r})
result = [made.cpu_offload_gb, made.offload_group_size, type(get_offloader()).__name__]
"""
    assert sglang_child.run(code) == [0, -1, "NoopOffloader"]


def test_finding_6_a_compiler_with_headers_of_another_release_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(compiler: str, headers: int) -> None:
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "include").mkdir(exist_ok=True)
        nvcc = tmp_path / "bin" / "nvcc"
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {compiler}, V{compiler}.9'\n")
        nvcc.chmod(0o755)
        (tmp_path / "include" / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {headers}\n")

    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert not toolkit.find_toolkit().consistent
    install("13.3", 13000)
    found = toolkit.find_toolkit()
    assert (found.compiler, found.headers, found.consistent) == ("13.3", "13.0", False)
    install("13.3", 13030)
    assert toolkit.find_toolkit().consistent


def test_finding_7_the_vision_tower_is_left_out(
    sglang_child: Child, arguments: list[str], tiny_packed: Path
) -> None:
    code = f"""
from sglang.srt.server_args import ServerArgs, prepare_server_args
made = prepare_server_args({arguments!r})
result = ["Qwen4ExpForConditionalGeneration" in ServerArgs.LANGUAGE_MODEL_ONLY_ARCHITECTURES, made.language_model_only]
"""
    allowed, left_out = sglang_child.run(code)
    text_only = json.loads((tiny_packed / "config.json").read_text()).get("language_model_only", False)
    assert allowed
    assert left_out or text_only


def test_finding_8_the_convolution_reads_the_weight_that_was_loaded(sglang_child: Child) -> None:
    """A stale view gives zeros, then NaN. That the agreement with transformers would show one: test_engine."""
    code = """
import torch
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_loader.weight_utils import default_weight_loader
weight = torch.nn.Parameter(torch.zeros(6, 1, 4))
sizes = dict(num_q_heads=1, num_k_heads=1, num_v_heads=1, head_q_dim=2, head_k_dim=2, head_v_dim=2)
attention = RadixLinearAttention(layer_id=0, conv_weights=weight.view(6, 4), **sizes)
default_weight_loader(weight, torch.arange(24.0).view(6, 1, 4))
result = attention.conv_weights.flatten().tolist()
"""
    assert sglang_child.run(code) == list(range(24))


def test_finding_9_only_the_experts_that_a_token_chose_are_read(tiny_packed: Path) -> None:
    """Experts are no parameters that a hook would copy whole; and no byte is pinned that no row needs."""
    options = ExtensionOptions(str(tiny_packed), device_rows=0, fewest_device_rows=0, spare=2)
    rows = ExpertRows(Checkpoint.open(tiny_packed), options, torch.device("cpu"))
    try:
        chosen = torch.tensor([[3, 5, 7, 9]], dtype=torch.int32)
        run(rows, 1, torch.randn(1, rows.layout.hidden).bfloat16(), chosen, torch.full((1, 4), 0.25))
        status = rows.status()
        assert status["traffic"]["decode"]["host_bytes"] == 4 * rows.layout.row_bytes
        assert status["host_bytes_pinned"] <= 1.01 * status["host_bytes_requested"]
    finally:
        rows.cache.close()


def test_finding_9_experts_are_neither_parameters_nor_buffers(sglang_child: Child) -> None:
    code = """
import torch
from q38.sglang_ext.experts import RowExpertsMethod
layer = torch.nn.Module()
layer.moe_tp_size, layer.moe_ep_size, layer.num_fused_shared_experts, layer.layer_id, layer.top_k = 1, 1, 0, 0, 4
RowExpertsMethod(2, 128, "experts").create_weights(layer, 16, 256, 64, torch.bfloat16)
result = [len(list(layer.parameters())), len(list(layer.buffers()))]
"""
    assert sglang_child.run(code) == [0, 0]
