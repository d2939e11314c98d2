"""Where a method tunes: names of devices, what a value takes there, and what its bytes depend on."""

from __future__ import annotations

import re
from typing import Any

import q38
from q38.base.errors import InputError, ResourceError
from q38.checkpoint.job import package_versions

# Packages that the bytes depend on.
_SHAPING = ("torch", "transformers", "auto-round", "tokenizers", "triton")


def environment(devices: str) -> dict[str, Any]:
    """What tuned bytes depend on beside the job's identity: versions of packages, and the kind of each device."""
    import torch

    installed = package_versions()
    kinds = (
        [torch.backends.cpu.get_cpu_capability()]
        if devices == "cpu"
        else [torch.cuda.get_device_name(int(n)) for n in devices.split(",")]
    )
    versions = {name: installed[name] for name in _SHAPING if name in installed}
    return {"version": {"q38": q38.__version__, **versions}, "device": ", ".join(kinds)}


def item_bytes(devices: str) -> int:
    """Bytes of a value of the block inputs on "cpu" or on GPUs."""
    from q38.quantize.torch_state import compute_dtype

    return compute_dtype(devices).itemsize


def device_map(name: str, *, absent: bool = False) -> str:
    """ "auto" as "cpu" or all GPU numbers; others as they are.

    Args:
        absent: numbers may be those of another machine.

    Raises:
        InputError: neither "auto" nor "cpu" nor numbers.
        ResourceError: this machine has no such GPU.
    """
    if name == "cpu":
        return name
    import torch

    count = torch.cuda.device_count()
    if name == "auto":
        return ",".join(str(i) for i in range(count)) or "cpu"
    if not re.fullmatch(r"\d+(,\d+)*", name):
        raise InputError(f"'{name}' is no device", where="--device", remedy="write auto, cpu, 0 or 0,1")
    missing = next((n for n in name.split(",") if int(n) >= count), None)
    if missing is not None and not absent:
        raise ResourceError(
            f"GPU {missing} is not there, this machine has {count}",
            where="--device",
            remedy="write auto, or a smaller number",
        )
    return name
