"""The CUDA sources compile for every architecture that q38 names, with NVRTC alone."""

from __future__ import annotations

import pytest
import torch

from q38.base.errors import ResourceError
from q38.kernels import moe_prefill_cuda, nvrtc
from q38.kernels.moe_decode import SOURCE, DecodeConfig, default_config, defines
from q38.residency.layout import ExpertLayout

REAL = ExpertLayout(2560, 640)


@pytest.fixture(scope="module")
def compiler() -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        from cuda.bindings import nvrtc as library

        library.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed ({error})")


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
def test_the_prefill_kernels_compile(layout: ExpertLayout, gated: bool) -> None:
    constants = moe_prefill_cuda.defines(layout, 8, gated, torch.bfloat16, torch.float16)
    assert nvrtc.compile_cubin(moe_prefill_cuda.SOURCE, constants, "sm_90")


@pytest.mark.usefixtures("compiler")
def test_a_source_that_does_not_compile_names_its_first_error() -> None:
    with pytest.raises(RuntimeError, match=r"moe_decode\.cu.*HIDDEN"):
        nvrtc.compile_cubin(SOURCE, {}, "sm_90")


def test_loading_without_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ResourceError, match="no CUDA GPU"):
        nvrtc.load_kernels(SOURCE, {}, ("gate_up",))
