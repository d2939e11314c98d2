"""Where the split n-gram table of a model is."""

from __future__ import annotations

from pathlib import Path

from q38.base.errors import InputError

PLE_JSON = "ple.json"


def find_ple(model: Path, ple: Path | None = None) -> Path | None:
    """The directory with the model's ple.json, or None if its table was not split off.

    Order: `ple` if given, MODEL/ple, then ple beside MODEL.

    Raises:
        InputError: `ple` is given and holds no ple.json.
    """
    if ple is not None:
        directory = ple.parent if ple.name == PLE_JSON else ple
        if not (directory / PLE_JSON).is_file():
            raise InputError(f"holds no {PLE_JSON}", where=ple, remedy="make it with q38 split-ple")
        return directory
    candidates = (model / "ple", model.absolute().parent / "ple")
    return next((c for c in candidates if (c / PLE_JSON).is_file()), None)
