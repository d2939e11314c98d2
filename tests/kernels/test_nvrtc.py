"""The CUDA sources compile for every architecture that q38 names, with NVRTC alone."""

from __future__ import annotations

import pytest
import torch

from q38.base.errors import ResourceError
from q38.kernels import gemv_int8, kv_gather_cuda, moe_prefill_cuda, moe_sort, nvrtc
from q38.kernels.moe_decode import SOURCE, DecodeConfig, default_config, defines
from q38.model.kv_format import INT4_G32, INT8_G64, KvFormat
from q38.residency.layout import ExpertLayout

REAL = ExpertLayout(2560, 640)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90", "sm_120"])
def test_the_decode_kernels_compile(arch: str) -> None:
    config = default_config(REAL, 16)
    assert (
        nvrtc.compile_cubin(SOURCE, defines(REAL, 10, config, torch.bfloat16, torch.float16), arch)[:4]
        == b"\x7fELF"
    )


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("layout", "config"),
    [
        (REAL, DecodeConfig(registers=True)),
        (ExpertLayout(384, 256), DecodeConfig(depth2=2)),
        (ExpertLayout(2048, 768), DecodeConfig(tiles13=2, tiles2=4, depth2=3)),
    ],
)
def test_the_decode_kernels_compile_for_other_shapes_and_geometries(
    layout: ExpertLayout, config: DecodeConfig
) -> None:
    assert nvrtc.compile_cubin(SOURCE, defines(layout, 8, config, torch.float16, torch.bfloat16), "sm_90")


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("layout", [REAL, ExpertLayout(384, 256)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_120"])
def test_the_prefill_kernels_compile(layout: ExpertLayout, gated: bool, arch: str) -> None:
    constants = moe_prefill_cuda.defines(layout, 8, gated, torch.bfloat16, torch.float16)
    source = moe_prefill_cuda.tile_of(moe_prefill_cuda.MmaConfig()).source
    assert nvrtc.compile_cubin(source, constants, arch)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("gated", [True, False])
def test_the_prefill_kernels_of_hopper_compile_and_two_blocks_fit(gated: bool) -> None:
    tile = moe_prefill_cuda.tile_of(moe_prefill_cuda.HopperConfig())
    constants = moe_prefill_cuda.defines(REAL, 10, gated, torch.bfloat16, torch.float16)
    constants |= {**tile.constants, "TILES": tile.tiles[0 if gated else 1]}
    cubin = nvrtc.compile_cubin(tile.source, constants, "sm_90a")
    assert b"grouped" in cubin and tile.shared_bytes <= 227 * 1024 // 2


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
@pytest.mark.parametrize("tokens", [1, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_int8_kernel_compiles(arch: str, tokens: int, dtype: torch.dtype) -> None:
    silu, gate = (gemv_int8.Epilogue(kind, 4) for kind in ("silu", "gate"))
    for k, n, group, epilogue in ((10240, 320, 128, None), (10240, 320, 128, silu), (320, 10240, 64, gate)):
        config = gemv_int8.default_config(k, n, group)
        constants = gemv_int8.defines(k, n, group, config, tokens, dtype, torch.float16, epilogue=epilogue)
        assert nvrtc.compile_cubin(gemv_int8.SOURCE, constants, arch)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kv", [INT8_G64, INT4_G32], ids=lambda kv: kv.name)
@pytest.mark.parametrize("tiered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_kv_gather_compiles(kv: KvFormat, tiered: bool, dtype: torch.dtype) -> None:
    constants = kv_gather_cuda.defines(512, kv, kv_gather_cuda.GatherConfig(), dtype, 8, tiered=tiered)
    assert nvrtc.compile_cubin(kv_gather_cuda.SOURCE, constants, "sm_89")


@pytest.mark.usefixtures("compiler")
def test_the_sort_and_the_sum_compile() -> None:
    assert nvrtc.compile_cubin(moe_sort.SOURCE, moe_sort.defines(moe_sort.MOST_EXPERTS, 64), "sm_80")
    constants = moe_prefill_cuda.sum_defines(REAL, 10, torch.bfloat16)
    assert nvrtc.compile_cubin(moe_prefill_cuda.SUM, constants, "sm_80")


@pytest.mark.usefixtures("compiler")
def test_a_source_that_does_not_compile_names_its_first_error() -> None:
    with pytest.raises(RuntimeError, match=r"moe_decode\.cu.*HIDDEN"):
        nvrtc.compile_cubin(SOURCE, {}, "sm_90")


def test_loading_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="no CUDA GPU"):
        nvrtc.load_kernels(SOURCE, {}, ("gate_up",))
