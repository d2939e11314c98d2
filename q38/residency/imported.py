"""Routing recorded elsewhere: traces and profiles of q38, and the `.pt` files of earlier tools.

    a folder        routing_*.pt in the order of their names, one trace
    dump.pt         a list of steps, each (ids integer [L, K], weights float [L, K]) of one decoded token
    profile.pt      a dict with count integer [L, E], mass float [L, E] and, in some, tokens
    *.safetensors   a trace of q38 build-placement --trace, or a profile

`.pt` files are read with torch.load(weights_only=True), which runs no code of the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from q38.base.errors import InputError
from q38.checkpoint.header import read_header
from q38.residency.profile import Profile, load, load_halves, merge
from q38.residency.smoothing import smoothed_rates
from q38.residency.trace import IDS, Trace, read_trace

DUMPS = "routing_*.pt"
_REMEDY = (
    "give a trace or profile of q38 build-placement, a dump of (ids, weights), or a dict of count and mass"
)


@dataclass(frozen=True)
class Sizes:
    """What a file must agree with: layers, experts of each, and experts a token chooses."""

    layers: int
    experts: int
    top_k: int


@dataclass(frozen=True)
class Imported:
    """A profile, and the profiles of the two halves of its tokens where the file still tells them apart."""

    whole: Profile
    halves: tuple[Profile, Profile] | None


def import_files(
    files: Sequence[Path], sizes: Sizes, *, weights: Sequence[float] | None = None, smoothing: bool = False
) -> Imported:
    """Read and merge routing files.

    Args:
        weights: the share of each file's workload; default by its tokens.
        smoothing: draw each file's counts toward the others' (q38.residency.smoothing). A smoothed profile that is
            read counts with its plain counts.

    Raises:
        InputError: a file is none of the above, is of another model, or is damaged; or bad weights.
    """
    parts = [_import_file(file, sizes) for file in files]

    def merged(profiles: list[Profile]) -> Profile:
        whole = merge(profiles, weights)
        smooth = smoothing and len(profiles) > 1
        return replace(whole, rate=smoothed_rates(profiles, weights)) if smooth else whole

    whole = merged([part.whole for part in parts])
    pairs = [part.halves for part in parts if part.halves]
    if len(pairs) < len(parts):
        return Imported(whole, None)
    return Imported(whole, (merged([pair[0] for pair in pairs]), merged([pair[1] for pair in pairs])))


def of_trace(trace: Trace) -> Imported:
    """The profile of a trace and of its two halves."""
    first, second = trace.split(trace.tokens // 2)
    return Imported(Profile.of_trace(trace), (Profile.of_trace(first), Profile.of_trace(second)))


def _import_file(file: Path, sizes: Sizes) -> Imported:
    if file.is_dir():
        dumps = sorted(file.glob(DUMPS))
        if not dumps:
            raise InputError(f"holds no {DUMPS}", where=file, remedy=_REMEDY)
        traces = [_steps(dump, _load(dump), sizes) for dump in dumps]
        ids = np.concatenate([trace.ids for trace in traces])
        gates = np.concatenate([trace.weights for trace in traces if trace.weights is not None])
        return of_trace(Trace(ids, gates, sizes.experts))
    if file.suffix == ".safetensors":
        if IDS not in read_header(file).tensors:
            profile, halves = load(file), load_halves(file)
            _require(profile.count.shape, (sizes.layers, sizes.experts), "counts", file)
            return Imported(profile, halves)
        trace = read_trace(file)
        found = (trace.layers, trace.top_k, trace.experts)
        _require(found, (sizes.layers, sizes.top_k, sizes.experts), "layers, choices and experts", file)
        return of_trace(trace)
    value = _load(file)
    if isinstance(value, dict):
        return Imported(_profile(file, value, sizes), None)
    return of_trace(_steps(file, value, sizes))


def _load(file: Path) -> Any:
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError("no such file", where=file, remedy=_REMEDY) from None
    except Exception as error:  # noqa: BLE001  (damaged bytes raise whatever they happen to mean)
        reason = " ".join(str(error).split())[:120]
        raise InputError(f"holds no plain tensors ({reason})", where=file, remedy=_REMEDY) from None


def _profile(file: Path, value: dict[Any, Any], sizes: Sizes) -> Profile:
    import torch

    arrays = {}
    for name in ("count", "mass"):
        tensor = value.get(name)
        if not isinstance(tensor, torch.Tensor):
            raise InputError(f"has no tensor '{name}'", where=file, remedy=_REMEDY)
        _require(tuple(tensor.shape), (sizes.layers, sizes.experts), name, file)
        arrays[name] = tensor.to(torch.float64).numpy()
    count, mass = arrays["count"], arrays["mass"]
    for array in (count, mass):
        if not np.isfinite(array).all() or (array < 0).any() or not count.any() or (count % 1).any():
            raise InputError(
                "counts are no counts, or masses are negative or not finite", where=file, remedy=_REMEDY
            )
    # Every token chooses top_k experts in every layer.
    tokens = value.get("tokens", round(count.sum() / (sizes.layers * sizes.top_k)))
    if type(tokens) is not int or tokens < 1:
        raise InputError(f"tokens is {tokens!r}", where=file, remedy=_REMEDY)
    return Profile(count.astype(np.int64), mass, tokens)


def _steps(file: Path, value: Any, sizes: Sizes) -> Trace:
    import torch

    shape = (sizes.layers, sizes.top_k)
    if not isinstance(value, (list, tuple)) or not value:
        raise InputError(f"holds a {type(value).__name__}, not steps", where=file, remedy=_REMEDY)
    for step in value:
        if (
            not isinstance(step, (list, tuple))
            or len(step) != 2
            or not all(isinstance(part, torch.Tensor) for part in step)
        ):
            raise InputError("a step is not a pair of ids and weights", where=file, remedy=_REMEDY)
        _require((tuple(step[0].shape), tuple(step[1].shape)), (shape, shape), "a step's shapes", file)
    ids = torch.stack([step[0] for step in value])
    gates = torch.stack([step[1] for step in value]).float()
    if ids.is_floating_point() or int(ids.min()) < 0 or int(ids.max()) >= sizes.experts:
        raise InputError(f"ids are not integers below {sizes.experts}", where=file, remedy=_REMEDY)
    if not bool(torch.isfinite(gates).all()) or float(gates.min()) < 0:
        raise InputError("weights are negative or not finite", where=file, remedy=_REMEDY)
    return Trace(ids.to(torch.int64).numpy(), gates.numpy(), sizes.experts)


def _require(found: Any, wanted: Any, what: str, file: Path) -> None:
    if found != wanted:
        raise InputError(
            f"{what}: {found}, the model has {wanted}", where=file, remedy="give a file of this model"
        )
