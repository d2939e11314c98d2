"""Kernel tests run Triton's interpreter where there is no GPU, and compiled kernels where there is one."""

from __future__ import annotations

import pytest
import torch

from q38.base.settings import export

if not torch.cuda.is_available():
    export({"TRITON_INTERPRET": "1"})  # read when a kernel's module is imported


@pytest.fixture(scope="session")
def device() -> str:
    """Where kernels run here. Skips when Triton is not installed."""
    pytest.importorskip("triton", reason="Triton is not installed (pip install 'q38[kernels]')")
    return "cuda" if torch.cuda.is_available() else "cpu"
