"""Every step of the model runs inside the gate, so that rows move between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from q38.base.errors import InputError
from q38.sglang_ext.hooks import Hook, exit_on_refusal
from q38.sglang_ext.targets import SCHEDULER


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(SCHEDULER + ".run_batch", "around", run_batch)]


def run_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """One step, on the stream that rows are then moved against."""
    from q38.sglang_ext import residency

    stored = residency.loaded()
    if stored is None:
        return original(self, *args, **kwargs)
    if self.enable_overlap:
        with exit_on_refusal():
            raise InputError(
                "the next step is scheduled before this one's tokens are known, and the n-gram rows depend on them",
                where="sglang",
                remedy="start SGLang with --disable-overlap-schedule",
            )
    if "kv" not in stored.others:
        stored.others["kv"] = lambda: _kv_use(self)
    with stored.gate.step():
        stored.follow_stream()
        return original(self, *args, **kwargs)


def _kv_use(scheduler: Any) -> dict[str, int]:
    """Tokens in the KV cache, those of finished requests that a prefix cache keeps among them, and the most it holds."""
    total = int(scheduler.max_total_num_tokens)
    return {"used": total - int(scheduler.token_to_kv_pool_allocator.available_size()), "total": total}
