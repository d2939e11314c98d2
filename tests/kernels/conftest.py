"""Kernel tests run compiled kernels where there is a GPU, Triton's interpreter elsewhere (tests/conftest.py asks for it)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run here. Skips when Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="session")
def compiler() -> None:
    """Skips where NVRTC is not installed."""
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
    try:
        from cuda.bindings import nvrtc as library

        library.nvrtcVersion()
    except RuntimeError as error:
        pytest.skip(f"NVRTC is not installed ({error})")
