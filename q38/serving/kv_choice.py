"""--kv: `auto` takes the most exact format of the KV cache that costs the experts next to nothing; what a GPU cannot read is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from q38.base.errors import InputError, ResourceError
from q38.serving.machine import Gpu
from q38.serving.sglang_settings import KV_AUTO, Resolved

if TYPE_CHECKING:
    from q38.serving.sglang_plan import ServePlan

BY_ERROR = ("bf16", "int8", "int8ring_int4", "int4")  # docs/kv.md; fp8 is less exact than int8 and no smaller
_FP8_FROM = (8, 9)  # compute capability: neither SGLang's kernels nor q38's read e4m3 before it
_KEPT = 0.95  # of the rows that the smallest format leaves in GPU memory with the whole context in use


def choose_kv(resolved: Resolved, plan: Callable[[Resolved], ServePlan]) -> tuple[Resolved, ServePlan]:
    """The settings with a format in them, and their plan.

    Raises:
        ResourceError: no format fits; the message is that of the smallest.
    """
    if resolved.kv != KV_AUTO:
        return resolved, plan(resolved)
    fitting: list[tuple[Resolved, ServePlan]] = []
    refused: ResourceError | None = None
    for name in BY_ERROR:
        tried = replace(resolved, kv=name)
        try:
            fitting.append((tried, plan(tried)))
        except ResourceError as error:
            refused = error
    if not fitting:
        assert refused is not None
        raise refused
    most = max(found.fewest_device_rows for _, found in fitting)
    return next(both for both in fitting if both[1].fewest_device_rows >= _KEPT * most)


def refuse_unreadable(kv: str, gpu: Gpu) -> None:
    """Refuse a format that a GPU has no instructions for.

    Raises:
        InputError: fp8 before compute capability 8.9.
    """
    if kv == "fp8" and tuple(int(part) for part in gpu.compute_capability.split(".")) < _FP8_FROM:
        raise InputError(
            f"fp8 needs compute capability {_FP8_FROM[0]}.{_FP8_FROM[1]}, {gpu.name} has {gpu.compute_capability}",
            where="--kv",
            remedy="use --kv int8",
        )
