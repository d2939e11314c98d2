"""Timing on the GPU: medians over replays of a captured graph, and the limits of the machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch


def graph_time(calls: Sequence[Callable[[], object]], *, replays: int = 15, warmup: int = 3) -> float:
    """Median seconds per call, with all calls captured into one CUDA graph.

    Give enough calls that what they read is several times the L2 cache; then each replay is cold.
    """
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return event_time(graph.replay, repeats=replays, warmup=warmup) / len(calls)


def event_time(call: Callable[[], object], *, repeats: int = 7, warmup: int = 2) -> float:
    """Median seconds of one call, by device events."""
    for _ in range(warmup):
        call()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = _event(), _event()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return float(statistics.median(times))


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def copy_rate(nbytes: int = 2**31) -> float:
    """Device copy, bytes read plus written per second."""
    a = torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    b = torch.empty_like(a)
    return 2 * nbytes / event_time(lambda: b.copy_(a))


def link_rate(nbytes: int = 2**29) -> float:
    """Pinned host to device copy, bytes per second."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    return nbytes / event_time(lambda: device.copy_(host, non_blocking=True))


def matmul_rate(dtype: torch.dtype = torch.bfloat16, n: int = 8192) -> float:
    """Square matrix product on random data, operations (two a multiply-add) per second."""
    a = torch.randn(n, n, device="cuda", dtype=dtype)
    b = torch.randn(n, n, device="cuda", dtype=dtype)
    return 2 * n**3 / event_time(lambda: a @ b)
