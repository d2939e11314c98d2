"""The ctypes side of the driver: what can be checked without a GPU."""

from __future__ import annotations

import ctypes

import pytest

from q38.base.errors import ResourceError
from q38.residency import driver as module
from q38.residency.driver import Cuda, CudaError, Driver, OutOfMemory
from tests.residency.fake_driver import FakeDriver


def test_structures_have_the_sizes_of_the_c_headers() -> None:
    # cuda.h on 64-bit Linux: CUmemAllocationProp, CUmemAccessDesc, CUmemcpyAttributes.
    assert ctypes.sizeof(module._AllocationProp) == 32
    assert ctypes.sizeof(module._AccessDesc) == 12
    assert ctypes.sizeof(module._CopyAttributes) == 24
    assert module._AllocationProp.location.offset == 8 and module._AllocationProp.flags.offset == 24


def test_a_machine_without_the_driver_library_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ctypes.CDLL:
        raise OSError(name)

    monkeypatch.setattr(module.ctypes, "CDLL", absent)
    with pytest.raises(
        ResourceError, match=r"CUDA driver library is absent\. Use a machine with an NVIDIA GPU"
    ):
        Cuda()


def test_errors_name_the_call_and_the_code_and_out_of_memory_has_a_remedy() -> None:
    assert (
        str(CudaError("cuMemMap", 1, "invalid argument"))
        == "CUDA: cuMemMap failed: invalid argument (error 1)."
    )
    assert "Lower the experts in VRAM" in str(OutOfMemory("cuMemCreate"))
    assert OutOfMemory("x").exit_code == 3


def test_the_fake_and_the_real_driver_implement_the_same_calls() -> None:
    names = [n for n in vars(Driver) if not n.startswith("_")]
    assert len(names) > 20
    for name in names:
        assert hasattr(FakeDriver, name) and hasattr(Cuda, name), name
