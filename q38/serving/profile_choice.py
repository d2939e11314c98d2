"""The routing profile that a server of the sglang engine starts with: the one that is given, else the model's own."""

from __future__ import annotations

from pathlib import Path

from q38.base.errors import InputError
from q38.checkpoint.index import Checkpoint
from q38.model.shape import ModelShape
from q38.residency.find import find_profile

NONE = "none"  # in the place of a file: no profile, though there is one with the model


def choose_profile(checkpoint: Checkpoint, given: Path | None) -> tuple[Path | None, str]:
    """The profile, None where all experts start alike, and a line that says which and why.

    A profile that was not asked for and does not fit the model is passed over, and the line says so.

    Raises:
        InputError: `given` is absent, is no profile, or one of another number of layers or experts.
    """
    if given == Path(NONE):
        return None, "routing profile: none, as asked for, all experts start alike"
    if given is not None:
        if not given.is_file():
            raise InputError("no such file", where=given, remedy="make it with q38 build-placement")
        _require_fit(given, checkpoint)
        return given, f"routing profile: {given}"
    found = find_profile(checkpoint.path)
    if found is None:
        return None, "routing profile: none, all experts start alike"
    try:
        _require_fit(found, checkpoint)
    except InputError as error:
        return None, f"routing profile: none, all experts start alike. Passed over: {error}"
    return found, f"routing profile: {found}, found with the model"


def _require_fit(file: Path, checkpoint: Checkpoint) -> None:
    from q38.sglang_ext.row_plan import read_heat

    shape = ModelShape.from_config(checkpoint.config)
    read_heat(file, shape.num_layers, shape.num_experts)
