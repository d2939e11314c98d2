"""The result of a check: what was looked at, what was found, and the limit beside it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

SHOWN_FAULTS = 100  # a broken shard makes thousands of equal rows; the document keeps the first of them


@dataclass(frozen=True)
class Fault:
    """One thing wrong. `tensor` is None where a whole file is at fault."""

    file: str
    tensor: str | None
    what: str

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass
class Check:
    """One row of a report.

    passed: None when the check could not run or has no limit; `note` says why.
    value, limit, standard_error: for checks that measure; `better` says on which side of the limit is good.
    """

    name: str
    passed: bool | None
    checked: int = 0
    unit: str = "tensors"
    value: float | None = None
    standard_error: float | None = None
    limit: float | None = None
    note: str = ""
    faults: list[Fault] = field(default_factory=list)

    @classmethod
    def of_faults(
        cls, name: str, faults: Iterable[Fault], *, checked: int, unit: str = "tensors", note: str = ""
    ) -> Check:
        """A check that passes when there is no fault."""
        found = list(faults)
        return cls(name, not found, checked, unit, note=note, faults=found)

    @classmethod
    def skipped(cls, name: str, why: str) -> Check:
        return cls(name, None, note=why)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "checked": self.checked,
            "unit": self.unit,
            "value": finite(self.value),
            "standard_error": finite(self.standard_error),
            "limit": self.limit,
            "note": self.note,
            "fault_count": len(self.faults),
            "faults": [f.to_dict() for f in self.faults[:SHOWN_FAULTS]],
        }


@dataclass
class Part:
    """One part of a report: its checks, and whatever else it measured."""

    name: str
    checks: list[Check]
    data: dict[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed is not False for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "passed": self.passed,
            "checks": [check.to_dict() for check in self.checks],
            **self.data,
        }


def finite(value: float | None) -> float | None:
    """The value, or None where JSON has no number for it."""
    return value if value is not None and math.isfinite(value) else None
