"""A request with a token id outside the vocabulary is refused where it arrives.

SGLang 0.5.23 checks ids that it is asked to score, not those of the prompt: one of them ends the process with the
model by a device-side assertion, and every request with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import TOKENIZER


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(TOKENIZER + "._validate_one_request", "around", validate_one_request)]


def validate_one_request(original: Callable[..., None], self: Any, obj: Any, input_ids: Any) -> None:
    """SGLang's checks, then this one. A ValueError becomes the answer 400."""
    original(self, obj, input_ids)
    size = self.model_config.vocab_size
    if input_ids and not 0 <= min(input_ids) <= max(input_ids) < size:
        worst = next(i for i in input_ids if not 0 <= i < size)
        raise ValueError(f"token id {worst} of the prompt is outside the vocabulary, which has {size}")
