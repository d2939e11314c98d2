"""The sparse-attention indexer asks the device for its largest position in every layer; it need not.

SGLang reserves the rotary cache for the whole context when the model is loaded, so the check that costs one
synchronization per attention layer and prefill chunk finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import INDEXER


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [
        Hook(INDEXER + ".project_qk", "around", project_qk),
        Hook(INDEXER + ".apply_rope", "around", apply_rope),
    ]


def project_qk(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """project_qk without the check."""
    return original(self, *args[:5], **{**kwargs, "ensure_cos_sin_cache": False})


def apply_rope(
    original: Callable[..., Any], self: Any, positions: Any, tensor: Any, ensure_cos_sin_cache: bool = True
) -> Any:
    """apply_rope without the check."""
    return original(self, positions, tensor, ensure_cos_sin_cache=False)
