"""Stand-ins for what SGLang imports and a CPU environment lacks. Call `prepare` before sglang is imported."""

from __future__ import annotations

import contextlib
import enum
import importlib.machinery
import sys
import types
from typing import Any


def prepare() -> None:
    """Make `import sglang` work beside a CPU build of torch. Does nothing a second time."""
    if "torchvision" not in sys.modules:
        _stand_in_for_torchvision()
    import torch
    import triton.runtime.autotuner as autotuner

    # SGLang enters this context on every device type; the CPU has only one.
    setattr(torch.cpu, "device", lambda index=None: contextlib.nullcontext())  # noqa: B010
    # The prefix cache's bookkeeping pins its masks without asking whether there is a device to copy them to.
    setattr(torch.Tensor, "pin_memory", lambda self, *args, **kwargs: self)  # noqa: B010
    # There is no device to time kernels on: the first configuration will do.
    autotuner.Autotuner._bench = lambda self, *args, config=None, **meta: [0.0, 0.0, 0.0]


class _Empty(types.ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__init__": lambda self, *args, **kwargs: None})
        setattr(self, name, made)
        return made


_InterpolationMode = enum.Enum(
    "_InterpolationMode", ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
)


def _stand_in_for_torchvision() -> None:
    """The wheel of torchvision needs a CUDA torch; SGLang imports it for image models that are not served here."""
    names = ("torchvision", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional", "io", "ops", "ops.boxes", "models")  # fmt: skip
    for name in names:
        full = name if name == "torchvision" else f"torchvision.{name}"
        module = _Empty(full)
        module.__spec__ = importlib.machinery.ModuleSpec(full, None, is_package=True)
        module.__path__ = []
        vars(module)["InterpolationMode"] = _InterpolationMode
        sys.modules[full] = module
        parent, _, leaf = full.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    vars(sys.modules["torchvision"])["__version__"] = "0"
