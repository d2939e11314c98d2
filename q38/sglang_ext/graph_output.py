"""Breakable CUDA graphs of decode: their output may be a LogitsProcessorOutput.

SGLang 0.5.23 knows tensors, proxies, tuples and lists there and raises TypeError for the dataclass. Its tensor
fields are handled one by one; other fields pass by reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch

from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.targets import BREAKABLE


def hooks() -> list[Hook]:
    """See hooks.apply."""
    functions = {
        "_output_rows": output_rows,
        "_alloc_full_buffer": alloc_full_buffer,
        "_slice_output": slice_output,
        "_copy_output_to_buffer": copy_output_to_buffer,
    }
    return [Hook(f"{BREAKABLE}.{name}", "around", function) for name, function in functions.items()]


def output_rows(original: Callable[..., int], self: Any, output: Any, cap: int) -> int:
    """Leading rows that all tensor fields have, at most `cap`."""
    if not _is_logits(output):
        return original(self, output, cap)
    rows = self._cuda_graph_runner.cuda_graph_output_rows(output)
    if rows is not None:
        return int(rows)
    return min([cap, *(tensor.shape[0] for _, tensor in _tensors(output))])


def alloc_full_buffer(original: Callable[..., Any], self: Any, output: Any, size: int) -> Any:
    """The same output with buffers of `size` rows for its tensor fields."""
    if not _is_logits(output):
        return original(self, output, size)
    return replace(output, **{name: original(self, tensor, size) for name, tensor in _tensors(output)})


def slice_output(original: Callable[..., Any], self: Any, output: Any, num_tokens: int) -> Any:
    """The same output with the first `num_tokens` rows of its tensor fields."""
    if not _is_logits(output):
        return original(self, output, num_tokens)
    return replace(output, **{name: tensor[:num_tokens] for name, tensor in _tensors(output)})


def copy_output_to_buffer(
    original: Callable[..., None], self: Any, output: Any, buffer: Any, num_tokens: int
) -> None:
    """Copy the tensor fields.

    Raises:
        ValueError: the two have different tensor fields.
    """
    if not (_is_logits(output) and _is_logits(buffer)):
        original(self, output, buffer, num_tokens)
        return
    source, target = dict(_tensors(output)), dict(_tensors(buffer))
    if source.keys() != target.keys():
        raise ValueError(f"logits output has {sorted(source)}, its buffer {sorted(target)}")
    for name, tensor in source.items():
        target[name][:num_tokens].copy_(tensor[:num_tokens])


def _is_logits(output: Any) -> bool:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput

    return isinstance(output, LogitsProcessorOutput)


def _tensors(output: Any) -> list[tuple[str, torch.Tensor]]:
    values = ((field.name, getattr(output, field.name)) for field in fields(output) if field.init)
    return [(name, value) for name, value in values if isinstance(value, torch.Tensor) and value.dim()]
