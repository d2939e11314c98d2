"""What may differ between two builds of one recipe on one machine. Everything else must be identical.

One place declares it. `q38 release diff` compares two releases up to these fields, and the tests build
twice and compare.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping
from typing import Any

from q38.release.layout import CARD, RECORDS, RELEASE, SUMS

WHOLE = ("*",)

# File -> fields that may differ, dotted, "*" for any one key or any index; WHOLE: the file may differ anywhere.
VARYING: Mapping[str, tuple[str, ...]] = {
    # Measurements and history: times of day, seconds, memory, speeds, process ids, ports.
    f"{RECORDS}/*": WHOLE,
    # Quotes the measurements.
    CARD: WHOLE,
    # When a step ended, and the time and memory that its blocks took.
    "MANIFEST.json": (
        "created",
        "result.seconds",
        "result.blocks.*.seconds",
        "result.blocks.*.host_peak",
        "result.blocks.*.device_peak",
    ),
    "ple/MANIFEST.json": ("created",),
    "q38/oracle.json": ("created",),
    # Lists the files above with their hashes, so `diff` compares those files instead.
    SUMS: WHOLE,
    RELEASE: (
        "seal",
        "created",
        "files",
        "identity",
        "steps.*.created",
        "steps.*.started",
        "steps.*.seconds",
        "steps.*.peak_memory",
    ),
}


def fields_of(name: str) -> tuple[str, ...]:
    """The fields of a file that may differ; empty: none."""
    return next((fields for pattern, fields in VARYING.items() if fnmatch.fnmatchcase(name, pattern)), ())


def same_but_for_fields(name: str, a: bytes, b: bytes) -> bool:
    """Whether two versions of a file differ in declared fields alone."""
    fields = fields_of(name)
    if a == b or fields == WHOLE:
        return True
    if not fields:
        return False
    try:
        one, other = json.loads(a), json.loads(b)
    except ValueError:
        return False
    return bool(without(one, fields) == without(other, fields))


def without(value: Any, fields: tuple[str, ...]) -> Any:
    """A copy of a JSON value with these fields taken out."""
    for field in fields:
        value = _without(value, field.split("."))
    return value


def _without(value: Any, path: list[str]) -> Any:
    key, *rest = path
    if isinstance(value, list) and key == "*":
        return [_without(item, rest) for item in value] if rest else []
    if not isinstance(value, dict):
        return value
    return {
        k: (_without(v, rest) if key in ("*", k) else v)
        for k, v in value.items()
        if rest or key not in ("*", k)
    }
