"""Each block on identical inputs: the reference's, so that one block's difference does not reach the next.

End to end, a changed order of summation grows with depth, because routing flips at near ties; block by
block it stays near rounding, and a wrong kernel shows in the block that has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from q38.base.errors import InputError
from q38.checkpoint.writer import write_safetensors
from q38.measure.forward import text_model

_KEY = "state.{:03d}"


def states_file(reference: Path) -> Path:
    """Where the states of a reference lie: beside it."""
    return reference.with_suffix(".layers.safetensors")


def record_states(model: Any, ids: Sequence[int]) -> list[torch.Tensor]:
    """What enters each block, and what leaves the last: float32 [tokens, width], one more than blocks."""
    states: list[torch.Tensor] = []
    layers = list(text_model(model).layers)

    def before(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states.append(_hidden(args, kwargs)[0].float().clone())

    def after(_module: Any, _args: Any, output: Any) -> None:
        states.append(_output(output)[0].float().clone())

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(layers[-1].register_forward_hook(after).remove)
        _forward(model, ids)
    return states


def layer_errors(model: Any, ids: Sequence[int], states: Sequence[torch.Tensor]) -> list[float]:
    """Per block: |output - reference's output| / |reference's output| (2-norms), fed the reference's input."""
    layers = list(text_model(model).layers)
    if len(states) != len(layers) + 1:
        raise InputError(f"the reference has {len(states) - 1} blocks, the model {len(layers)}")
    errors: list[float] = []

    def feed(position: int) -> Any:
        def before(
            _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            given = _hidden(args, kwargs)
            wanted = states[position][None].to(given.dtype)  # [1, T, W]
            if args:
                return (wanted, *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": wanted}

        return before

    def compare(position: int) -> Any:
        def after(_module: Any, _args: Any, output: Any) -> None:
            wanted = states[position + 1]
            norm = float(torch.linalg.vector_norm(wanted))
            gap = float(torch.linalg.vector_norm(_output(output)[0].float() - wanted))
            errors.append(gap / norm if norm else gap)

        return after

    with ExitStack() as stack:
        for i, layer in enumerate(layers):
            stack.callback(layer.register_forward_pre_hook(feed(i), with_kwargs=True).remove)
            stack.callback(layer.register_forward_hook(compare(i)).remove)
        _forward(model, ids)
    return errors


def write_states(reference: Path, states: Sequence[torch.Tensor]) -> str:
    """Write them beside the reference; returns the file's sha256."""
    tensors = {_KEY.format(i): state.contiguous() for i, state in enumerate(states)}
    return write_safetensors(states_file(reference), tensors).sha256


def read_states(reference: Path) -> list[torch.Tensor]:
    """Read them.

    Raises:
        InputError: they are not there, or damaged.
    """
    file = states_file(reference)
    remedy = "make the reference again with q38 oracle save --fresh"
    if not file.is_file():
        raise InputError("the states of the blocks are missing", where=file, remedy=remedy)
    try:
        tensors = load_file(file)
    except Exception as error:  # noqa: BLE001 - safetensors raises its own kinds
        raise InputError(f"is damaged ({error})", where=file, remedy=remedy) from None
    return [tensors[key] for key in sorted(tensors)]


def _forward(model: Any, ids: Sequence[int]) -> None:
    from q38.hf.hooks import qsa_shortcut

    with qsa_shortcut(), torch.inference_mode():
        model.model(input_ids=torch.tensor([list(ids)]), use_cache=False)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    value: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return value


def _output(output: Any) -> torch.Tensor:
    value: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return value
