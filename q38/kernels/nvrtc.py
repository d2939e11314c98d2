"""Compile CUDA C++ at run time and launch it: NVRTC and the driver through cuda-python.

cuda-python and NVRTC come with every CUDA build of torch, so no compiler needs to be installed.
Machine code is kept in the cache directory (q38.base.settings), since a compilation takes seconds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from q38.base import settings
from q38.base.errors import ResourceError
from q38.kernels.compile_cache import cache_key, cached

if TYPE_CHECKING:
    import torch

_TYPES = {int: ctypes.c_int, float: ctypes.c_float}


@dataclass(frozen=True)
class Kernel:
    """One entry point of a loaded module."""

    handle: Any
    name: str

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        args: Sequence[Any],
        *,
        stream: int,
        shared_bytes: int = 0,
        dependent: bool = False,
    ) -> None:
        """Launch on `stream`.

        Args:
            args: tensors (their addresses are passed) and ints (passed as 32 bit).
            shared_bytes: dynamic shared memory, at most what `allow_shared` asked for.
            dependent: programmatic dependent launch: the grid may start before the one in front of it
                ends, and waits for it inside. Needs compute capability 9.0.
        """
        driver = _driver()
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid[0], grid[1], 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared_bytes
        config.hStream = stream
        if dependent:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        values = tuple(a.data_ptr() if hasattr(a, "data_ptr") else a for a in args)
        types = tuple(ctypes.c_void_p if hasattr(a, "data_ptr") else _TYPES[type(a)] for a in args)
        check(driver.cuLaunchKernelEx(config, self.handle, (values, types), 0), self.name)

    def allow_shared(self, nbytes: int) -> None:
        """Raise the limit of dynamic shared memory; needed above 48 KiB less the static part."""
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        check(driver.cuFuncSetAttribute(self.handle, attribute, nbytes), self.name)

    @property
    def registers(self) -> int:
        """Registers a thread."""
        driver = _driver()
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
        return int(check(driver.cuFuncGetAttribute(attribute, self.handle), self.name))


def takes_dependent(device: torch.device) -> bool:
    """Whether a device has programmatic dependent launches, see `Kernel.launch`."""
    import torch

    return torch.cuda.get_device_capability(device)[0] >= 9


def in_order(device: torch.device) -> dict[str, Any]:
    """`stream` and `dependent` of a launch: after what torch has enqueued, dependent where the device can."""
    import torch

    stream = torch.cuda.current_stream(device).cuda_stream
    return {"stream": stream, "dependent": takes_dependent(device)}


def available() -> str | None:
    """None when kernels can be compiled and run here, else what is missing."""
    import torch

    if not torch.cuda.is_available():
        return "no CUDA GPU"
    return _missing_library()


@functools.cache
def _missing_library() -> str | None:
    try:
        from cuda.bindings import driver, nvrtc

        driver.cuDriverGetVersion()
        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        return f"cuda-bindings with NVRTC ({error})"
    return None


def load_kernels(file: Path, defines: Mapping[str, int], names: Sequence[str]) -> list[Kernel]:
    """Compile `file` for the current device and load the kernels `names`; cached for the process.

    Raises:
        ResourceError: there is no GPU or no NVRTC, or the driver refuses the module.
    """
    if (missing := available()) is not None:
        raise ResourceError(
            f"{missing} for {file.name}",
            where="kernels",
            remedy="install a CUDA build of torch, or use Triton",
        )
    import torch

    return list(_load(file, tuple(sorted(defines.items())), tuple(names), torch.cuda.current_device()))


@functools.cache
def _load(
    file: Path, defines: tuple[tuple[str, int], ...], names: tuple[str, ...], device: int
) -> tuple[Kernel, ...]:
    import torch

    torch.zeros(1, device=device)  # makes torch's context current in this thread
    major, minor = torch.cuda.get_device_capability(device)
    arch = f"sm_{major}{minor}" + ("a" if (major, minor) == (9, 0) else "")  # wgmma needs sm_90a
    driver = _driver()
    module = check(driver.cuModuleLoadData(cached_cubin(file, dict(defines), arch)), file.name)
    return tuple(
        Kernel(check(driver.cuModuleGetFunction(module, name.encode()), name), name) for name in names
    )


def cached_cubin(file: Path, defines: Mapping[str, int], arch: str) -> bytes:
    """compile_cubin, or what an earlier process compiled from the same texts by the same compiler.

    Raises:
        RuntimeError: the compiler's messages.
    """
    from cuda.bindings import nvrtc

    texts = [part for header in _headers(file) for part in (header.name.encode(), header.read_bytes())]
    version = ".".join(map(str, check(nvrtc.nvrtcVersion(), "nvrtcVersion")))
    key = cache_key(
        [f"nvrtc {version}".encode(), file.name.encode(), file.read_bytes(), *texts, *_options(defines, arch)]
    )
    return cached(settings.load().cache_dir / "kernels", key, lambda: compile_cubin(file, defines, arch))


def compile_cubin(file: Path, defines: Mapping[str, int], arch: str) -> bytes:
    """Machine code of `file` for one architecture, for example sm_90. Needs no GPU.

    Raises:
        RuntimeError: the compiler's messages.
    """
    from cuda.bindings import nvrtc

    headers = _headers(file)
    texts, names = [h.read_bytes() for h in headers], [h.name.encode() for h in headers]
    program = check(
        nvrtc.nvrtcCreateProgram(file.read_bytes(), file.name.encode(), len(headers), texts, names), file.name
    )
    options = _options(defines, arch)
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytearray(check(nvrtc.nvrtcGetProgramLogSize(program), file.name))
        nvrtc.nvrtcGetProgramLog(program, log)
        raise RuntimeError(f"{file.name}: {log.decode(errors='replace').strip()[:2000]}")
    cubin = bytearray(check(nvrtc.nvrtcGetCUBINSize(program), file.name))
    check(nvrtc.nvrtcGetCUBIN(program, cubin), file.name)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin)


def _headers(file: Path) -> list[Path]:
    return sorted(file.parent.glob("*.cuh"))


def _options(defines: Mapping[str, int], arch: str) -> list[bytes]:
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    return [o.encode() for o in (*options, *(f"-D{name}={value}" for name, value in sorted(defines.items())))]


def check(answer: tuple[Any, ...], what: str) -> Any:
    """The value of a cuda-python call, or a RuntimeError that names the call's error."""
    error, *values = answer
    if int(error) != 0:
        raise RuntimeError(f"{what}: {error.name}")
    return values[0] if len(values) == 1 else tuple(values)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver
