"""A routing profile: how often each layer selected each expert, and with how much gate weight.

File: safetensors with count int64 [L, E] and mass float32 [L, E]; the metadata says of which model, on
which text, by which versions. Same input, same bytes. A file made by q38 build-placement also holds
the two halves of its trace (half_count and half_mass [2, L, E]), so that the profile can be tested on
tokens it was not built from. A smoothed profile holds its rates too (rate, half_rate float32).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from q38.base.errors import InputError
from q38.base.files import advising, holds
from q38.checkpoint.header import Header, read_header
from q38.checkpoint.writer import FileRecord, write_safetensors
from q38.residency.trace import Trace

SCHEMA = "q38.routing-profile/1"
MIN_TOKENS = 512  # with fewer, most experts of a real layer are seen a handful of times or never
_OWN = ("format", "schema", "tokens", "half_tokens")  # metadata that is a field here
_REMAKE = "make it again with q38 build-placement"
Counts = npt.NDArray[np.int64]
Masses = npt.NDArray[np.float64]
Rates = npt.NDArray[np.float64]
_ROUTER = re.compile(r"(?:^|\.)layers\.(?P<n>\d+)\.mlp\.gate$")


@dataclass(frozen=True)
class Profile:
    """What the routers of a model chose over `tokens` tokens.

    count: int64 [L, E] selections.
    mass: float64 [L, E] sum of the gate weights of the selections.
    metadata: what the file says of its origin.
    rate: float64 [L, E] smoothed selections per token (q38.residency.smoothing), which then order the experts.
    """

    count: Counts
    mass: Masses
    tokens: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    rate: Rates | None = None

    @classmethod
    def of_trace(cls, trace: Trace) -> Profile:
        """The sums of a trace."""
        return cls(trace.counts().astype(np.int64), trace.mass(), trace.tokens)

    @property
    def layers(self) -> int:
        return int(self.count.shape[0])

    @property
    def experts(self) -> int:
        return int(self.count.shape[1])


@contextmanager
def recording(model: Any) -> Iterator[list[Trace]]:
    """Record every selection of the model's routers inside the `with` block.

    Args:
        model: a transformers Qwen4-Exp model. A router's output is (logits, gate weights [T, k], experts [T, k]).

    Yields:
        a list that holds one Trace, of all tokens in the order they were run, when the block ends.
    """
    routers = {
        int(match["n"]): module for name, module in model.named_modules() if (match := _ROUTER.search(name))
    }
    if not routers or sorted(routers) != list(range(len(routers))):
        raise ValueError(f"routers of layers {sorted(routers)}: a model has one in each layer")
    ids: list[list[npt.NDArray[np.int64]]] = [[] for _ in routers]
    weights: list[list[npt.NDArray[np.float32]]] = [[] for _ in routers]

    def hook(layer: int) -> Any:
        def store(_module: Any, _inputs: Any, output: Any) -> None:
            ids[layer].append(output[2].cpu().numpy())
            weights[layer].append(output[1].float().cpu().numpy())

        return store

    handles = [module.register_forward_hook(hook(layer)) for layer, module in routers.items()]
    found: list[Trace] = []
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
    if ids[0]:
        stacked = [
            np.stack([np.concatenate(layer) for layer in part], axis=1) for part in (ids, weights)
        ]  # [T, L, K]
        found.append(Trace(stacked[0], stacked[1], next(iter(routers.values())).weight.shape[0]))


def merge(profiles: Sequence[Profile], weights: Sequence[float] | None = None) -> Profile:
    """One profile of several workloads.

    Args:
        weights: share of each workload, default by its tokens. A workload's selections are scaled to
            its share of all tokens together, and counts are rounded.

    Raises:
        InputError: profiles of models of different shape, or weights that are no shares.
    """
    shares = workload_shares(profiles, weights)
    total = sum(p.tokens for p in profiles)
    factors = [share * total / p.tokens for share, p in zip(shares, profiles, strict=True)]
    count = sum(
        (f * p.count for f, p in zip(factors, profiles, strict=True)), np.zeros(profiles[0].count.shape)
    )
    mass = sum((f * p.mass for f, p in zip(factors, profiles, strict=True)), np.zeros(profiles[0].mass.shape))
    return Profile(np.rint(count).astype(np.int64), mass, total)


def workload_shares(profiles: Sequence[Profile], weights: Sequence[float] | None) -> list[float]:
    """The share of each workload, summing to one: `weights`, default by tokens.

    Raises:
        InputError: profiles of models of different shape, or weights that are no shares.
    """
    if not profiles or any(p.count.shape != profiles[0].count.shape for p in profiles):
        raise InputError(
            "profiles of models of different shape cannot be merged", remedy="give profiles of one model"
        )
    found = [float(p.tokens) for p in profiles] if weights is None else list(weights)
    if len(found) != len(profiles) or not all(s >= 0 for s in found) or not sum(found) > 0:
        raise InputError(
            f"{found} are no shares of {len(profiles)} profiles", remedy="give one positive number each"
        )
    return [s / sum(found) for s in found]


def save(profile: Profile, file: Path, *, halves: tuple[Profile, Profile] | None = None) -> FileRecord:
    """Write a profile, and the two halves of its trace where they are given. Atomic.

    Raises:
        InputError: fewer than MIN_TOKENS tokens, or the directory cannot be written.
        ResourceError: the disk is full.
    """
    import torch

    require_tokens(profile.tokens, where=file)
    arrays: dict[str, npt.NDArray[Any]] = {"count": profile.count, "mass": profile.mass.astype(np.float32)}
    if profile.rate is not None:
        arrays["rate"] = profile.rate.astype(np.float32)
    metadata = {"format": "pt", "schema": SCHEMA, "tokens": str(profile.tokens), **profile.metadata}
    if halves:
        rates = [half.rate for half in halves if half.rate is not None]
        if len(rates) == 2:
            arrays["half_rate"] = np.stack(rates).astype(np.float32)
        arrays["half_count"] = np.stack([half.count for half in halves])
        arrays["half_mass"] = np.stack([half.mass for half in halves]).astype(np.float32)
        metadata["half_tokens"] = ",".join(str(half.tokens) for half in halves)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return write_safetensors(file, tensors, dict(sorted(metadata.items())))


def is_there(file: Path) -> bool:
    """Whether a profile is in `file`; False where nothing is.

    Raises:
        InputError: it holds something else.
    """
    return holds(file, f"{SCHEMA} file", lambda f: read_header(f).metadata.get("schema") == SCHEMA)


def load(file: Path) -> Profile:
    """Read a profile.

    Raises:
        InputError: no such file, no routing profile, damaged contents, or too few tokens.
    """
    header, metadata = _header(file)
    count, mass = _pair(header, "count", "mass", dimensions=2)
    tokens = _number(header, "tokens")
    require_tokens(tokens, where=file)
    return Profile(count, mass, tokens, metadata, _rates(header, "rate", count.shape))


def load_halves(file: Path) -> tuple[Profile, Profile] | None:
    """The two halves of a profile's trace, None where the file has none.

    Raises:
        InputError: as `load`.
    """
    header, _ = _header(file)
    if "half_count" not in header.tensors:
        return None
    count, mass = _pair(header, "half_count", "half_mass", dimensions=3)
    tokens = [int(n) for n in header.metadata.get("half_tokens", "").split(",") if n.isdigit()]
    if len(count) != 2 or len(tokens) != 2:
        raise InputError("holds no two halves", where=file, remedy=_REMAKE)
    rates = _rates(header, "half_rate", count.shape)
    first, second = (
        Profile(count[i], mass[i], tokens[i], rate=None if rates is None else rates[i]) for i in range(2)
    )
    return first, second


def require_tokens(tokens: int, *, where: str | Path) -> None:
    """Refuse a trace that is too short to rank experts by."""
    if tokens < MIN_TOKENS:
        raise InputError(
            f"{tokens} tokens are traced, a routing profile needs {MIN_TOKENS}",
            where=where,
            remedy="trace more text",
        )


def _header(file: Path) -> tuple[Header, dict[str, str]]:
    """The header of a profile, and what its metadata says of its origin."""
    with advising("make one with q38 build-placement"):
        header = read_header(file)
        if header.metadata.get("schema") != SCHEMA:
            raise InputError(f"is no {SCHEMA} file", where=header.file)
    return header, {k: v for k, v in header.metadata.items() if k not in _OWN}


def _number(header: Header, key: str) -> int:
    value = header.metadata.get(key, "")
    if not value.isdigit():
        raise InputError(f"its metadata has no {key}", where=header.file, remedy=_REMAKE)
    return int(value)


def _pair(header: Header, count: str, mass: str, *, dimensions: int) -> tuple[Counts, Masses]:
    """The two tensors, checked for dtype, shape and sense."""
    infos = [header.tensors.get(count), header.tensors.get(mass)]
    found = [(info.dtype, info.shape) if info else None for info in infos]
    shape = found[0][1] if found[0] else ()
    if found != [("I64", shape), ("F32", shape)] or len(shape) != dimensions or 0 in shape:
        raise InputError(
            f"{count} and {mass} are not I64 and F32 of one shape", where=header.file, remedy=_REMAKE
        )
    counts, masses = (
        np.fromfile(header.file, dtype, count=info.numel, offset=info.begin).reshape(info.shape)
        for info, dtype in zip(infos, (np.int64, np.float32), strict=True)
        if info
    )
    if (counts < 0).any() or not np.isfinite(masses).all() or (masses < 0).any():
        raise InputError("counts or masses are negative or not finite", where=header.file, remedy=_REMAKE)
    return counts, masses.astype(np.float64)


def _rates(header: Header, name: str, shape: tuple[int, ...]) -> Rates | None:
    """The tensor of smoothed rates, None where the file has none."""
    info = header.tensors.get(name)
    if info is None:
        return None
    if info.dtype != "F32" or info.shape != shape:
        raise InputError(f"{name} is not F32 of the counts' shape", where=header.file, remedy=_REMAKE)
    rates = np.fromfile(header.file, np.float32, count=info.numel, offset=info.begin).reshape(shape)
    if not np.isfinite(rates).all() or (rates < 0).any():
        raise InputError(f"{name} is negative or not finite", where=header.file, remedy=_REMAKE)
    return rates.astype(np.float64)
