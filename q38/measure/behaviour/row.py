"""A row of the report: a check, and whether any model must pass it or only one that can do the task."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from q38.measure.checks import Check, Fault

Kind = Literal["protocol", "capability"]


class Unsupported(Exception):
    """The server does not offer what a check needs. The row then has no verdict, and says so."""


@dataclass(frozen=True)
class Row:
    """protocol: holds for any model, an untrained one included. capability: the model has to be able to do it."""

    kind: Kind
    check: Check


def protocol(
    name: str, faults: Sequence[str], *, note: str = "", where: str = "answer", **fields: Any
) -> Row:
    """A protocol row that passes when nothing is at fault; the first fault is its note."""
    found = [Fault(where, None, what) for what in faults]
    check = Check(name, not found, note=faults[0] if faults else note, faults=found, **_units(fields))
    return Row("protocol", check)


def unjudged(name: str, why: str, *, kind: Kind = "protocol", **fields: Any) -> Row:
    """A row without a verdict."""
    return Row(kind, Check(name, None, note=why, **_units(fields)))


def capability(name: str, passed: bool, *, judged: bool, note: str = "", **fields: Any) -> Row:
    """A capability row. Where it is not judged, what was found is recorded and is no pass."""
    if judged:
        return Row("capability", Check(name, passed, note=note, **_units(fields)))
    found = f"recorded, not judged: {note or ('yes' if passed else 'no')}"
    return Row("capability", Check(name, None, note=found, **_units(fields)))


def _units(fields: dict[str, Any]) -> dict[str, Any]:
    return {"unit": "answers", **fields}
