"""Apply hooks through SGLang's registry and verify each: the registry itself only logs a failure."""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from q38.base.errors import CheckFailed, Q38Error

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hook:
    """One change to a name of SGLang.

    kind: "around" gets (original, *args); "after" gets (result, *args) and may return a new result;
        "replace" puts `value` (a class) in its place; "set" assigns `value` to an attribute.
    """

    target: str
    kind: Literal["around", "after", "replace", "set"]
    value: Any


def apply(hooks: Sequence[Hook]) -> None:
    """Apply the hooks in order and check that every one is in place.

    Raises:
        CheckFailed: a hook did not take; the message names all of them.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in hooks:
        if hook.kind == "set":
            _set(hook)
        else:
            HookRegistry.register(hook.target, hook.value, HookType(hook.kind))
    HookRegistry.apply_hooks()
    failed = [hook.target for hook in hooks if not in_place(hook)]
    if failed:
        raise CheckFailed(
            f"hooks that did not take: {', '.join(failed)}",
            where="sglang",
            remedy="look for other plugins with: q38 patch-sglang check",
        )
    logger.info("q38: %d hooks applied and verified", len(hooks))


@contextmanager
def exit_on_refusal() -> Iterator[None]:
    """A refusal goes to stderr in one line and ends the process with its exit code.

    SystemExit, because SGLang catches every Exception of a plugin, logs it and goes on.
    """
    try:
        yield
    except Q38Error as error:
        sys.stderr.write(f"q38: {error}\n")
        sys.stderr.flush()
        raise SystemExit(error.exit_code) from None


def in_place(hook: Hook) -> bool:
    """Whether a hook is what its name resolves to now."""
    try:
        found = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    if hook.kind == "set":
        return bool(found == hook.value)
    if hook.kind == "replace" and isinstance(hook.value, type):
        return found is hook.value
    return _wraps(found, hook.value)


def _wraps(found: Any, value: Callable[..., Any]) -> bool:
    """Whether `value` is one of the functions in a chain of the registry's wrappers."""
    function = getattr(found, "__func__", found)
    while function is not None:
        cells = getattr(function, "__closure__", None) or ()
        if any(cell.cell_contents is value for cell in cells):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _set(hook: Hook) -> None:
    owner, _, name = hook.target.rpartition(".")
    try:
        target = pkgutil.resolve_name(owner)
        getattr(target, name)
    except (ImportError, AttributeError):
        return  # reported by in_place
    setattr(target, name, hook.value)
