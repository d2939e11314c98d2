"""Where the routing profile of a model is."""

from __future__ import annotations

from pathlib import Path

PROFILE = "placement.safetensors"


def find_profile(model: Path) -> Path | None:
    """The profile that belongs to a model directory, or None.

    Order: MODEL/q38, as in a release, then beside MODEL, as `q38 run` writes it.
    """
    candidates = (model / "q38" / PROFILE, model.absolute().parent / PROFILE)
    return next((c for c in candidates if c.is_file()), None)
