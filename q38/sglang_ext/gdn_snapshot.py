"""A prefix's snapshot of a Gated DeltaNet state is kept in float32, as the state itself is.

Where a prompt step ends between two multiples of 64 tokens, the snapshot for the prefix cache is the state inside the
step, which SGLang takes from the states of all chunks: those are in the activations' dtype. Its kernel can write the one that is
wanted in float32, as it does for Kimi Delta Attention; the Gated DeltaNet never asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import FLA_STATES, GDN_DISPATCHER, GDN_TRITON


@dataclass
class Wanted:
    """Where a prompt step's snapshots go: states [N, HV, V, K] float32, chunks [N] int32 (-1: none of this request).

    asked: the kernel was told of them.
    """

    states: torch.Tensor
    chunks: torch.Tensor
    asked: bool = False


_wanted: Wanted | None = None  # the step that runs; a scheduler runs one at a time


def hooks() -> list[Hook]:
    """See hooks.apply. The registry also exchanges the function where SGLang has imported it."""
    return [
        Hook(GDN_DISPATCHER + ".__init__", "around", dispatcher),
        Hook(GDN_DISPATCHER + ".extend", "around", extend),
        Hook(FLA_STATES, "around", states),
    ]


def dispatcher(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang allocates the snapshot, and passes it on, for kernels that say they write it."""
    original(self, *args, **kwargs)
    if torch.cuda.is_available() and _drops_them(self.extend_kernel):
        self.extend_kernel.supports_track_state_snapshot = True


def extend(
    original: Callable[..., Any],
    self: Any,
    *args: Any,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """GDNKernelDispatcher.extend; SGLang's kernel class drops the two.

    Raises:
        RuntimeError: nothing has written the snapshot, which SGLang would now copy into the prefix cache.
    """
    if track_state is None or track_chunk_idx is None or not _drops_them(self.extend_kernel):
        return original(self, *args, track_state=track_state, track_chunk_idx=track_chunk_idx, **kwargs)
    wanted = Wanted(track_state, track_chunk_idx)
    with _asked_for(wanted):
        result = original(self, *args, **kwargs)
    if not wanted.asked:
        raise RuntimeError("the kernel of the Gated DeltaNet was not asked for a prefix's state")
    return result


def states(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """chunk_gated_delta_rule_fwd_h with the snapshot that the step wants."""
    if _wanted is not None and kwargs.get("track_state") is None:
        kwargs |= {"track_state": _wanted.states, "track_chunk_idx": _wanted.chunks}
        _wanted.asked = True
    return original(*args, **kwargs)


def _drops_them(kernel: Any) -> bool:
    return type(kernel).__name__ == GDN_TRITON.rpartition(".")[2]


@contextmanager
def _asked_for(wanted: Wanted) -> Iterator[None]:
    global _wanted
    _wanted = wanted
    try:
        yield
    finally:
        _wanted = None
