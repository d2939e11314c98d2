"""Tuned launch geometry: JSON files keyed by device, Triton version, shape and token count.

A shipped file sits in assets/triton/<device>.json; `q38 tune-triton` writes the same format, by default to the
directory that is looked in first. A lookup wants the same device and shape, and takes the nearest token count (by
ratio). Without a match every kernel has a default that runs anywhere.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from q38.base import settings
from q38.base.errors import InputError
from q38.checkpoint.index import read_json
from q38.data import data_path

SCHEMA = "q38.kernels/1"
KERNELS = ("decode", "prefill", "int8")


@dataclass(frozen=True)
class Entry:
    """One tuned choice.

    kernel: decode, prefill or int8.
    shape: what the kernel's speed depends on, for example {"hidden": .., "intermediate": .., "top_k": ..}.
    tokens: the token count it was measured at.
    config: the fields of the kernel's config class.
    us, default_us: microseconds of this config and of the default one, in the same run; default_us is
        None where the default does not run.
    """

    kernel: str
    shape: dict[str, int]
    tokens: int
    config: dict[str, Any]
    us: float
    default_us: float | None


@dataclass(frozen=True)
class Tuned:
    """The contents of one file."""

    device: str
    triton: str
    routing: str
    entries: tuple[Entry, ...]

    def find(self, kernel: str, shape: Mapping[str, int], tokens: int) -> Entry | None:
        """The entry of the nearest token count for a kernel and shape, or None."""
        same = [e for e in self.entries if e.kernel == kernel and e.shape == dict(shape)]
        return min(same, key=lambda e: (abs(math.log(e.tokens / tokens)), e.tokens), default=None)

    def to_dict(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "device": self.device,
            "triton": self.triton,
            "routing": self.routing,
            "entries": [asdict(e) for e in self.entries],
        }


def load(file: Path) -> Tuned:
    """Read one file.

    Raises:
        InputError: absent, not JSON, another schema, or a field is missing or unknown.
    """
    value = read_json(file)
    if value.get("schema") != SCHEMA:
        raise InputError(
            f"schema {value.get('schema')!r}, not {SCHEMA}", where=file, remedy="run q38 tune-triton again"
        )
    try:
        entries = tuple(Entry(**e) for e in value["entries"])
        if any(e.kernel not in KERNELS or e.tokens < 1 for e in entries):
            raise ValueError("an entry has an unknown kernel or token count")
        return Tuned(value["device"], value["triton"], value["routing"], entries)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"malformed tuned configs ({error})", where=file, remedy="run q38 tune-triton again"
        ) from None


def shipped(device: str) -> Tuned | None:
    """The file that comes with q38 for a device name as the driver gives it, or None."""
    file = data_path("assets", "triton", file_name(device))
    return load(file) if file.exists() else None


def own_directory() -> Path:
    """Where the files that this user tuned are looked for."""
    return settings.load().state_dir / "tuned"


@functools.lru_cache(maxsize=8)
def in_use(device: str) -> Tuned | None:
    """The user's own file for a device, else the shipped one, else None. Read once.

    Raises:
        InputError: the file is malformed.
    """
    own = own_directory() / file_name(device)
    return load(own) if own.is_file() else shipped(device)


def file_name(device: str) -> str:
    """'NVIDIA H200' -> 'NVIDIA_H200.json'."""
    return re.sub(r"[^A-Za-z0-9]+", "_", device).strip("_") + ".json"
