"""SGLang's scheduler imports its modules while the server's first process imports its own.

The first process starts the interpreter (`early_process`) before it imports SGLang, so it lies in the same process
group, and in the same systemd scope where there is one. The scheduler that SGLang starts later runs in it.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any

from q38.base import settings
from q38.sglang_ext.early_process import Popen, Unanswered, Waiting
from q38.sglang_ext.options import ExtensionOptions

_SCHEDULER = ("sglang.srt.managers.scheduler", "run_scheduler_process")
# No further module of SGLang: hooks are applied when this one is imported, and it is what a scheduler of SGLang's own
# start has imported by then.
PRELOAD = ("q38.sglang_ext.server:prepare_process", _SCHEDULER[0])
# It reads PROMETHEUS_MULTIPROC_DIR as it is imported.
_WITHOUT = ("prometheus_client",)
# What SGLang sets before it starts a scheduler that has one GPU to itself (entrypoints.engine._set_envs_and_config,
# arg_groups.serving_hook.handle_environment_variables): whatever was there, and where nothing was.
_SET = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "8",
    "SGLANG_DISABLE_OUTLINES_DISK_CACHE": "0",
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": "0",
    "SGLANG_ENABLE_TORCH_COMPILE": "0",
    "SGLANG_USE_CUDA_IPC_TRANSPORT": "0",
}
_DEFAULTS = {
    "CUTE_DSL_LOG_LEVEL": "30",
    "CUTE_DSL_LOG_TO_CONSOLE": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TRTLLM_ENABLE_PDL": "1",
}
CARRIED = frozenset(
    {
        # Of this start of SGLang; read by what it imports later, if at all.
        "PROMETHEUS_MULTIPROC_DIR",
        "SGLANG_RUN_ID",
        # On a GPU without DeepGEMM; read by a model's module, and SGLang imports those with the model.
        "SGLANG_OPT_FP8_WO_A_GEMM",
        # SGLang sets these as it is imported, so they are there by now, with the same values: sglang/__init__.py
        # before it imports anything else, then layers.deep_gemm_wrapper and layers.quantization.mxfp4.
        "CUDA_CACHE_PATH",
        "FLASHINFER_WORKSPACE_BASE",
        "TILELANG_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "TRITON_CACHE_DIR",
        "DG_JIT_CACHE_DIR",
        "DG_JIT_USE_NVRTC",
        "TLLM_LOG_LEVEL",
        # Set where a library brings Intel's OpenMP: what it does after a fork, and where two of it are loaded.
        "KMP_DUPLICATE_LIB_OK",
        "KMP_INIT_AT_FORK",
    }
)
# Soft limits that SGLang raises lower ones to (utils.common.set_ulimit).
_OPEN_FILES, _STACK = 65535, 1024 * 65535


def start(options: ExtensionOptions) -> Waiting | None:
    """Start the interpreter, where it is wanted and has a core to run on. None: SGLang starts its scheduler itself."""
    if not options.early_scheduler or settings.cpu_count() < 2:
        return None
    defaults = {name: value for name, value in _DEFAULTS.items() if name not in settings.child_env()}
    try:
        with settings.exported(defaults | _SET), _limits():
            return Waiting("scheduler", PRELOAD, without=_WITHOUT, carried=CARRIED)
    except OSError as error:
        sys.stderr.write(f"q38: no early scheduler ({error})\n")
        return None


@contextmanager
def taken_over(waiting: Waiting | None) -> Iterator[None]:
    """In the body, SGLang's first scheduler runs in the interpreter that waits. Without one by the end, it is ended."""
    if waiting is None:
        yield
        return
    standard: Any = vars(SpawnProcess)["_Popen"]

    def launch(process: BaseProcess) -> Any:
        if not _is_first_scheduler(process):
            return standard(process)
        setattr(SpawnProcess, "_Popen", standard)  # noqa: B010
        try:
            return Popen(process, waiting)
        except Unanswered as error:
            sys.stderr.write(f"q38: the early scheduler is not used: {error}\n")
            waiting.end()
            return standard(process)

    setattr(SpawnProcess, "_Popen", staticmethod(launch))  # noqa: B010
    try:
        yield
    finally:
        setattr(SpawnProcess, "_Popen", standard)  # noqa: B010
        waiting.end()


def _is_first_scheduler(process: Any) -> bool:
    """By the name of its target, whose first arguments are server_args, port_args, gpu_id, tp_rank, pp_rank."""
    target, arguments = process._target, process._args
    name = (getattr(target, "__module__", None), getattr(target, "__qualname__", None))
    return name == _SCHEDULER and arguments[3:5] == (0, 0)


@contextmanager
def _limits() -> Iterator[None]:
    """A new process has the limits that SGLang will set: the C library reads that of the stack as a program starts."""
    wanted = ((resource.RLIMIT_NOFILE, _OPEN_FILES), (resource.RLIMIT_STACK, _STACK))
    before = [(kind, resource.getrlimit(kind)) for kind, _ in wanted]
    for (kind, (soft, hard)), (_, least) in zip(before, wanted, strict=True):
        # SGLang, too, goes on where it may not.
        with suppress(ValueError):
            if soft < least:
                resource.setrlimit(kind, (least, hard))
    try:
        yield
    finally:
        for kind, limits in before:
            resource.setrlimit(kind, limits)
