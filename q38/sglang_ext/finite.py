"""Which part of the model first gave a value that is not finite: a check for finding faults, off unless asked for.

Every module notes on the device whether its output is finite, and nothing waits for it there. The notes are read once, when
the last module of the step has run: before the sampler, which a NaN may end the server in. Decode steps are not looked
at: they replay graphs, which run no module.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from q38.sglang_ext import residency
from q38.sglang_ext.hooks import Hook
from q38.sglang_ext.options import given
from q38.sglang_ext.targets import FORWARD_BATCH

logger = logging.getLogger(__name__)
_NEVER = 2**31 - 1
_LAST = "logits_processor"  # of every language model of SGLang


class FiniteCheck:
    """Looks at the prompt steps of one model.

    Args:
        last: name of the module that ends a step.

    Attributes:
        steps, failed: prompt steps looked at, and those with a value that is not finite.
        first: the module and the tokens of the first of those.
    """

    def __init__(self, model: nn.Module, last: str) -> None:
        self.steps = self.failed = 0
        self.first: str | None = None
        self._tokens = 0  # of the step under way; 0: it is not looked at
        self._called: list[
            str
        ] = []  # modules in the order in which they returned, so inner ones before outer ones
        self._earliest: torch.Tensor | None = None  # place of the first bad one among them
        for name, module in model.named_modules():
            if name:
                module.register_forward_hook(lambda _m, _in, out, name=name: self._look(name, out))
        model.get_submodule(last).register_forward_hook(lambda *_: self._end())

    def begin(self, tokens: int) -> None:
        """A step follows, of so many prompt tokens or of none."""
        self._tokens, self._called, self._earliest = tokens, [], None

    def to_dict(self) -> dict[str, Any]:
        """For the control interface."""
        return {"prompt_steps": self.steps, "not_finite": self.failed, "first": self.first}

    def _look(self, name: str, output: Any) -> None:
        if not self._tokens or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
            return
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
                self._note(name, tensor)

    def _note(self, name: str, tensor: torch.Tensor) -> None:
        wide = tensor if tensor.element_size() > 1 else tensor.float()
        place = torch.where(wide.isfinite().all(), _NEVER, len(self._called))
        self._called.append(name)
        self._earliest = place if self._earliest is None else torch.minimum(self._earliest, place)

    def _end(self) -> None:
        if not self._tokens or self._earliest is None:
            return
        self.steps += 1
        if (place := int(self._earliest)) != _NEVER:
            self.failed += 1
            told = f"output of {self._called[place]} in a step of {self._tokens} tokens"
            self.first = self.first or told
            logger.error("q38: not finite: %s", told)
        self.begin(0)


_checks: dict[int, FiniteCheck] = {}  # by model


def hooks() -> list[Hook]:
    """See hooks.apply."""
    return [Hook(FORWARD_BATCH + ".init_new", "after", begin_step)]


def begin_step(result: Any, _cls: type, batch: Any, model_runner: Any, *_args: Any, **_kwargs: Any) -> Any:
    """Look at a prompt step."""
    options = given()
    if options is None or not options.check_finite:
        return result
    model = model_runner.model
    check = _checks.get(id(model))
    if check is None:
        check = _checks[id(model)] = FiniteCheck(model, _LAST)
        if (stored := residency.loaded()) is not None:
            stored.others["finite"] = check.to_dict
    check.begin(len(result.input_ids) if batch.forward_mode.is_extend() else 0)
    return result
