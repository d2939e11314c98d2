"""The counting kernel compiles for the cards it is for; what it counts is tested in tests/sglang_ext/test_traffic.py."""

from __future__ import annotations

import pytest

from q38.kernels import nvrtc
from q38.kernels.expert_counter import SOURCE


@pytest.mark.parametrize("arch", ["sm_90a", "sm_120"])
def test_it_compiles(arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    assert (
        nvrtc.compile_cubin(SOURCE, {"EXPERTS": 512, "ACT_BF16": 0, "SCALE_BF16": 0}, arch)[:4] == b"\x7fELF"
    )
