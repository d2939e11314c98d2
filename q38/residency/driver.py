"""The CUDA calls that residency needs: one Protocol, and its implementation on the driver library.

Addresses, streams and events are plain integers, as the driver's handles are. Addresses of registered
host memory and of device memory share one space (unified addressing), so one copy call serves every
direction.

https://docs.nvidia.com/cuda/cuda-driver-api/ (virtual memory management, memory, stream, event)
"""

from __future__ import annotations

import ctypes
import sys
import threading
from ctypes import POINTER, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_ushort, c_void_p
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import ResourceError

if TYPE_CHECKING:
    import torch

Addresses = NDArray[np.int64]


class CudaError(ResourceError):
    """A CUDA call that failed. `call` and `code` say which and how."""

    def __init__(self, call: str, code: int, text: str, *, remedy: str | None = None) -> None:
        super().__init__(f"{call} failed: {text} (error {code})", where="CUDA", remedy=remedy)
        self.call = call
        self.code = code


class OutOfMemory(CudaError):
    """The device, or the host for registration, has no more memory to give."""

    def __init__(self, call: str, text: str = "out of memory") -> None:
        super().__init__(call, _OUT_OF_MEMORY, text, remedy="lower the experts in VRAM or the KV cache")


class Driver(Protocol):
    """What residency asks of CUDA.

    Every method may raise CudaError and has then done nothing; only `copy` may have enqueued some.
    """

    @property
    def granularity(self) -> int:
        """Bytes that sizes and addresses of mapped device memory are multiples of."""

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes of device memory, as the driver counts them."""

    def reserve(self, nbytes: int) -> int:
        """Reserve device addresses without memory behind them."""

    def unreserve(self, address: int, nbytes: int) -> None: ...

    def create(self, nbytes: int) -> int:
        """Physical device memory; returns its handle. Readable only after map and set_access."""

    def release(self, handle: int) -> None: ...

    def map(self, address: int, nbytes: int, handle: int) -> None: ...

    def unmap(self, address: int, nbytes: int) -> None:
        """Not ordered with streams: no kernel may still use the range."""

    def set_access(self, address: int, nbytes: int) -> None:
        """Make a mapped range readable and writable by the device."""

    def register(self, address: int, nbytes: int) -> int:
        """Pin host memory and map it for the device; returns the address the device reads it at."""

    def unregister(self, address: int) -> None: ...

    def allocate(self, nbytes: int) -> int:
        """Ordinary device memory, for small tables."""

    def deallocate(self, address: int) -> None: ...

    def new_stream(self) -> int:
        """A stream that does not wait for the default stream."""

    def synchronize(self, stream: int) -> None: ...

    def new_event(self) -> int: ...

    def record(self, event: int, stream: int) -> None: ...

    def stream_wait(self, stream: int, event: int) -> None:
        """What is enqueued on the stream from now on starts after the last record of the event, if there was one."""

    def done(self, event: int) -> bool:
        """Whether the work before the last record has finished. Does not wait."""

    def wait(self, event: int) -> None:
        """Block until the work before the last record has finished."""

    def copy(self, to: Addresses, source: Addresses, nbytes: int, stream: int) -> None:
        """Enqueue len(to) copies of `nbytes` each, in one call. They may run in any order."""

    def capturing(self, stream: int) -> bool:
        """Whether this thread may not touch memory now because `stream`, or torch's current one, records a graph."""

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes] that shares device memory and does not own it."""

    def close(self) -> None:
        """Destroy the streams and events made here."""


class _Location(ctypes.Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


class _AllocFlags(ctypes.Structure):
    _fields_ = [("compression", c_ubyte), ("rdma", c_ubyte), ("usage", c_ushort), ("reserved", c_ubyte * 4)]


class _AllocationProp(ctypes.Structure):
    _fields_ = [
        ("type", c_int),
        ("handle_types", c_int),
        ("location", _Location),
        ("win32", c_void_p),
        ("flags", _AllocFlags),
    ]


class _AccessDesc(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", c_int)]


class _CopyAttributes(ctypes.Structure):
    _fields_ = [("source_order", c_int), ("source", _Location), ("destination", _Location), ("flags", c_uint)]


_OUT_OF_MEMORY, _NOT_READY, _CAPTURE_IMPLICIT = 2, 600, 906
_LOCATION_DEVICE, _ALLOCATION_PINNED, _READ_WRITE, _IN_STREAM_ORDER = 1, 1, 3, 1
_NON_BLOCKING, _NO_TIMING, _PORTABLE_AND_MAPPED = 1, 2, 3
_HANDLE, _U64S = POINTER(c_void_p), POINTER(c_uint64)
_BATCH = [_U64S, _U64S, POINTER(c_size_t), c_size_t, POINTER(_CopyAttributes), POINTER(c_size_t), c_size_t]
_SIGNATURES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDeviceGet": [POINTER(c_int), c_int],
    "cuDevicePrimaryCtxRetain": [_HANDLE, c_int],
    "cuDevicePrimaryCtxRelease_v2": [c_int],
    "cuCtxSetCurrent": [c_void_p],
    "cuMemGetInfo_v2": [POINTER(c_size_t), POINTER(c_size_t)],
    "cuMemGetAllocationGranularity": [POINTER(c_size_t), POINTER(_AllocationProp), c_int],
    "cuMemAddressReserve": [_U64S, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemAddressFree": [c_uint64, c_size_t],
    "cuMemCreate": [_U64S, c_size_t, POINTER(_AllocationProp), c_uint64],
    "cuMemRelease": [c_uint64],
    "cuMemMap": [c_uint64, c_size_t, c_size_t, c_uint64, c_uint64],
    "cuMemUnmap": [c_uint64, c_size_t],
    "cuMemSetAccess": [c_uint64, c_size_t, POINTER(_AccessDesc), c_size_t],
    "cuMemHostRegister_v2": [c_void_p, c_size_t, c_uint],
    "cuMemHostUnregister": [c_void_p],
    "cuMemHostGetDevicePointer_v2": [_U64S, c_void_p, c_uint],
    "cuMemAlloc_v2": [_U64S, c_size_t],
    "cuMemFree_v2": [c_uint64],
    "cuStreamCreate": [_HANDLE, c_uint],
    "cuStreamDestroy_v2": [c_void_p],
    "cuStreamSynchronize": [c_void_p],
    "cuStreamIsCapturing": [c_void_p, POINTER(c_int)],
    "cuStreamWaitEvent": [c_void_p, c_void_p, c_uint],
    "cuLaunchHostFunc": [c_void_p, c_void_p, c_void_p],
    "cuEventCreate": [_HANDLE, c_uint],
    "cuEventDestroy_v2": [c_void_p],
    "cuEventRecord": [c_void_p, c_void_p],
    "cuEventQuery": [c_void_p],
    "cuEventSynchronize": [c_void_p],
    "cuMemcpyAsync": [c_uint64, c_uint64, c_size_t, c_void_p],
    "cuMemcpyBatchAsync_v2": [*_BATCH, c_void_p],  # CUDA 13
    "cuMemcpyBatchAsync": [*_BATCH, POINTER(c_size_t), c_void_p],  # CUDA 12.8; says which copy failed
}


class Cuda:
    """The driver library on one GPU, in the primary context that torch also uses.

    Args:
        device: CUDA ordinal.

    Raises:
        ResourceError: no driver library, or no such GPU.
    """

    def __init__(self, device: int = 0) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError:
            raise ResourceError(
                "the CUDA driver library is absent",
                where="libcuda.so.1",
                remedy="use a machine with an NVIDIA GPU and its driver",
            ) from None
        for name, arguments in _SIGNATURES.items():
            if self._has(name):
                getattr(self._library, name).argtypes = arguments
        self._library.cuGetErrorString.argtypes = [c_int, POINTER(c_char_p)]
        self._call("cuInit", 0)
        ordinal, context = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(ordinal), device)
        self._call("cuDevicePrimaryCtxRetain", byref(context), ordinal)
        self.device, self._context = ordinal.value, context
        self._thread = threading.local()
        self._streams: list[int] = []
        self._events: list[int] = []
        self._batch = next((n for n in ("cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync") if self._has(n)), None)
        self._prop = _AllocationProp(_ALLOCATION_PINNED, 0, _Location(_LOCATION_DEVICE, self.device))
        size = c_size_t()
        self._run("cuMemGetAllocationGranularity", byref(size), byref(self._prop), 0)
        self._granularity = size.value

    @property
    def granularity(self) -> int:
        return self._granularity

    def memory(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self._run("cuMemGetInfo_v2", byref(free), byref(total))
        return free.value, total.value

    def reserve(self, nbytes: int) -> int:
        return self._value("cuMemAddressReserve", nbytes, 0, 0, 0)

    def unreserve(self, address: int, nbytes: int) -> None:
        self._run("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> int:
        return self._value("cuMemCreate", nbytes, byref(self._prop), 0)

    def release(self, handle: int) -> None:
        self._run("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._run("cuMemMap", address, nbytes, 0, handle, 0)

    def unmap(self, address: int, nbytes: int) -> None:
        self._run("cuMemUnmap", address, nbytes)

    def set_access(self, address: int, nbytes: int) -> None:
        access = _AccessDesc(self._prop.location, _READ_WRITE)
        self._run("cuMemSetAccess", address, nbytes, byref(access), 1)

    def register(self, address: int, nbytes: int) -> int:
        self._run("cuMemHostRegister_v2", address, nbytes, _PORTABLE_AND_MAPPED)
        try:
            return self._value("cuMemHostGetDevicePointer_v2", address, 0)
        except CudaError:
            self.unregister(address)
            raise

    def unregister(self, address: int) -> None:
        self._run("cuMemHostUnregister", address)

    def allocate(self, nbytes: int) -> int:
        return self._value("cuMemAlloc_v2", nbytes)

    def deallocate(self, address: int) -> None:
        self._run("cuMemFree_v2", address)

    def new_stream(self) -> int:
        handle = c_void_p()
        self._run("cuStreamCreate", byref(handle), _NON_BLOCKING)
        self._streams.append(handle.value or 0)
        return self._streams[-1]

    def synchronize(self, stream: int) -> None:
        self._run("cuStreamSynchronize", stream)

    def call_host(self, stream: int, function: int, argument: int) -> None:
        """Enqueue a call of a C function `void (*)(void *)`, which may be captured. It must call neither CUDA nor Python."""
        self._run("cuLaunchHostFunc", stream, function, argument)

    def new_event(self) -> int:
        handle = c_void_p()
        self._run("cuEventCreate", byref(handle), _NO_TIMING)
        self._events.append(handle.value or 0)
        return self._events[-1]

    def record(self, event: int, stream: int) -> None:
        self._run("cuEventRecord", event, stream)

    def stream_wait(self, stream: int, event: int) -> None:
        self._run("cuStreamWaitEvent", stream, event, 0)

    def done(self, event: int) -> bool:
        self._attach()
        code: int = self._library.cuEventQuery(event)
        if code != _NOT_READY:
            self._check("cuEventQuery", code)
        return code == 0

    def wait(self, event: int) -> None:
        self._run("cuEventSynchronize", event)

    def copy(self, to: Addresses, source: Addresses, nbytes: int, stream: int) -> None:
        count = len(to)
        if count > 1 and self._batch and stream:  # a batch refuses the default stream
            targets, sources = (np.ascontiguousarray(a, np.uint64) for a in (to, source))
            sizes = np.full(count, nbytes, np.uint64)
            attributes, first, failed = _CopyAttributes(_IN_STREAM_ORDER), c_size_t(0), c_size_t()
            arguments = [
                targets.ctypes.data_as(_U64S), sources.ctypes.data_as(_U64S), sizes.ctypes.data_as(POINTER(c_size_t)),
                count, byref(attributes), byref(first), 1,
            ]  # fmt: skip
            if self._batch == "cuMemcpyBatchAsync":
                arguments.append(byref(failed))
            self._run(self._batch, *arguments, stream)
            return
        for target, origin in zip(to.tolist(), source.tolist(), strict=True):
            self._run("cuMemcpyAsync", target, origin, nbytes, stream)

    def capturing(self, stream: int) -> bool:
        self._attach()
        status = c_int()
        code: int = self._library.cuStreamIsCapturing(stream, byref(status))
        if code != _CAPTURE_IMPLICIT:  # the default stream, while another is capturing
            self._check("cuStreamIsCapturing", code)
        if code or status.value:
            return True
        torch = sys.modules.get("torch")  # which captures on whatever stream is current
        return bool(torch and torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    def tensor(self, address: int, nbytes: int) -> torch.Tensor:
        import torch

        return torch.as_tensor(_ArrayInterface(address, nbytes), device=f"cuda:{self.device}")

    def close(self) -> None:
        for event in self._events:
            self._run("cuEventDestroy_v2", event)
        for stream in self._streams:
            self._run("cuStreamDestroy_v2", stream)
        self._events, self._streams = [], []
        self._run("cuDevicePrimaryCtxRelease_v2", self.device)

    def _has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def _attach(self) -> None:
        """Make the context current in this thread; the driver keeps one per thread."""
        if not getattr(self._thread, "attached", False):
            self._call("cuCtxSetCurrent", self._context)
            self._thread.attached = True

    def _value(self, name: str, *arguments: Any) -> int:
        """A call whose first parameter receives a 64-bit result."""
        result = c_uint64()
        self._run(name, byref(result), *arguments)
        return result.value

    def _run(self, name: str, *arguments: Any) -> None:
        self._attach()
        self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._library, name)(*arguments))

    def _check(self, name: str, code: int) -> None:
        if code == 0:
            return
        text = c_char_p()
        self._library.cuGetErrorString(code, byref(text))
        message = (text.value or b"unknown error").decode()
        if code == _OUT_OF_MEMORY:
            raise OutOfMemory(name, message)
        raise CudaError(name, code, message)


class _ArrayInterface:
    """Device memory as torch takes it over without a copy."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
