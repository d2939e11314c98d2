"""The reference: the tiny model as transformers itself loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture(scope="session")
def reference(tiny_source: Path) -> Any:
    """The bf16 source as transformers loads it without q38: n-gram table in memory, vision tower and all."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(tiny_source, dtype=torch.bfloat16).eval()


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """Two rows of 24 tokens."""
    return torch.randint(10, 1000, (2, 24), generator=torch.Generator().manual_seed(0))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(input_ids=ids).logits
    return output
