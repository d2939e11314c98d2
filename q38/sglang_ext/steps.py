"""Every step of the model is enqueued inside the gate, so that rows move between steps: on request, or by what was read.

With overlap scheduling a step is enqueued while the one before still runs. Rows may move in between all the same: their new
addresses are uploaded on the stream of the steps, and their old places are given up once that stream has passed them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import SCHEDULER


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(SCHEDULER + ".run_batch", "around", run_batch)]


def run_batch(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Enqueue one step, on the stream that rows are then moved against."""
    from q38.sglang_ext import residency

    stored = residency.loaded()
    if stored is None:
        return original(self, *args, **kwargs)
    if "kv" not in stored.others:
        stored.others["kv"] = lambda: _kv_use(self)
    with stored.gate.step():
        stored.follow_stream(self.forward_stream if self.enable_overlap else None)
        batch = args[0] if args else kwargs["batch"]
        if not batch.forward_mode.is_extend():
            stored.adapt(batch.batch_size())
        elif stored.staging is not None:  # plans anew where rows have moved, so prompt steps move none
            stored.staging.begin(batch.extend_num_tokens)
        return original(self, *args, **kwargs)


def _kv_use(scheduler: Any) -> dict[str, int]:
    """Tokens in the KV cache, those of finished requests that a prefix cache keeps among them, and the most it holds."""
    total = int(scheduler.max_total_num_tokens)
    return {"used": total - int(scheduler.token_to_kv_pool_allocator.available_size()), "total": total}
