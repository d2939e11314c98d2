"""Replay a routing trace against residency policies, on the CPU.

Profiles are made from the first part of the trace and replayed on the rest, so no policy is judged on
what it has seen. All policies start from the same number of rows in VRAM.

    static count     the rows most often selected in the profile, the same number in every layer
    static mass      the rows with the most gate mass in the profile, the same number in every layer
    static budgets   the rows most often selected in the profile, of whatever layer
    lru              every missed row is fetched before it is used; the row unused longest leaves
    lfu              a missed row is fetched if its decayed count exceeds the lowest one in VRAM
    prior + swaps    static budgets, corrected every `interval` tokens by a bounded number of swaps
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from q38.base.errors import InputError
from q38.base.files import begins_with, holds
from q38.base.progress import SILENT, Progress
from q38.checkpoint.index import read_json
from q38.checkpoint.writer import atomic_file
from q38.model.shape import ModelShape
from q38.residency.heat import HeatTracker, choose_swaps, hottest, hottest_overall
from q38.residency.trace import Trace, read_trace

Counts = NDArray[np.int64]
Policy = Callable[["Replay"], "Moves"]

# REPORTED for the reference card (24 GB, 672 GB/s, PCIe 5 x16): what its kernels sustained.
LINK_RATE = 51e9
DEVICE_RATE = 500e9
_MARK = "drawn by q38 plan --figure"  # in the file's metadata
_FORMATS = {".png": "Description", ".svg": "Title"}  # suffix -> the field that holds the mark


@dataclass(frozen=True)
class Settings:
    """What the policies and the time model are given.

    resident: rows of each layer in VRAM, on average.
    row_bytes: bytes of a row.
    link_rate, device_rate: bytes/s at which kernels read rows over the link and in VRAM.
    half_life, prior_tokens, interval, swaps: of the counting policies, in tokens and pairs.
    """

    resident: int
    row_bytes: int
    link_rate: float = LINK_RATE
    device_rate: float = DEVICE_RATE
    half_life: float = 2000.0
    prior_tokens: float = 2000.0
    interval: int = 32
    swaps: int = 16


@dataclass(frozen=True)
class Replay:
    """One replay: the trace to serve, the profile to start from."""

    trace: Trace
    count: NDArray[np.float64]  # [L, E], selections per token
    mass: NDArray[np.float64]
    settings: Settings

    @property
    def total(self) -> int:
        return self.settings.resident * self.trace.layers


@dataclass(frozen=True)
class Moves:
    """What a policy did: selections that missed VRAM, those of them fetched first, and rows swapped beside the steps."""

    missed: Counts  # [T, L]
    fetched: Counts  # [T, L]
    swapped: int
    missed_mass: float | None


@dataclass(frozen=True)
class Outcome:
    """One policy on one trace.

    hit_rate: share of selections found in VRAM; mass_hit_rate: share of their gate mass (None without weights).
    host_bytes_per_token: read over the link, by kernels and by copies.
    moved_bytes_per_token: written back to the host to make room.
    ms_per_token: predicted time of the routed experts.
    """

    policy: str
    resident: int
    hit_rate: float
    mass_hit_rate: float | None
    host_bytes_per_token: float
    moved_bytes_per_token: float
    ms_per_token: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def row(self) -> tuple[object, ...]:
        """For a table: policy, S, hit rate, mass hit rate, host MB and moved MB per token, ms per token."""
        host, moved = self.host_bytes_per_token / 1e6, self.moved_bytes_per_token / 1e6
        return self.policy, self.resident, self.hit_rate, self.mass_hit_rate, host, moved, self.ms_per_token


def read_model_trace(file: Path, config: Path) -> Trace:
    """The trace in `file`, which must be of this model.

    Args:
        config: config.json, or a directory that holds one.

    Raises:
        InputError: not a trace, or of a model of another shape.
    """
    config = config / "config.json" if config.is_dir() else config
    shape = ModelShape.from_config(read_json(config), where=str(config))
    trace = read_trace(file)
    if (trace.experts, trace.layers) != (shape.num_experts, shape.num_layers):
        raise InputError(
            f"{trace.layers} layers of {trace.experts} experts, the model has {shape.num_layers} of {shape.num_experts}",
            where=file,
            remedy="give a trace of this model",
        )
    return trace


def simulate_and_plot(
    trace: Trace, settings: Settings, *, figure: Path | None = None, progress: Progress = SILENT
) -> list[Outcome]:
    """`simulate`, and a plot of it at several numbers of resident experts.

    Args:
        figure: PNG or SVG file to plot to.

    Raises:
        InputError: as `simulate`, or `figure` cannot be drawn there.
    """
    if figure is not None:
        require_figure(figure)
    outcomes = simulate(trace, settings, progress=progress)
    if figure is not None:
        sizes = {max(round(trace.experts * part / 8), trace.top_k) for part in range(1, 8)} - {
            settings.resident
        }
        points: list[Outcome] = []
        with progress.task("replay at other sizes", len(sizes), "sizes") as task:
            for size in sorted(sizes):
                points += simulate(trace, replace(settings, resident=size))
                task.advance(1)
        plot([*outcomes, *points], figure)
    return outcomes


def simulate(
    trace: Trace,
    settings: Settings,
    *,
    policies: Sequence[str] = (),
    fit: float = 0.5,
    progress: Progress = SILENT,
) -> list[Outcome]:
    """Replay the last part of `trace` against each policy (all by default).

    Args:
        fit: share of the tokens that profiles are made from.

    Raises:
        InputError: the trace is too short, or `resident` is not between top-k and the number of experts.
    """
    tokens = int(trace.tokens * fit)
    if tokens < 1 or tokens >= trace.tokens:
        raise InputError(
            f"a trace of {trace.tokens} tokens", where="trace", remedy="give at least two tokens"
        )
    require_resident(settings.resident, trace)
    profile, rest = trace.split(tokens)
    replay = Replay(rest, profile.counts() / tokens, profile.mass() / tokens, settings)
    outcomes = []
    with progress.task("replay", len(policies or POLICIES), "policies") as task:
        for name in policies or POLICIES:
            outcomes.append(_outcome(name, replay, POLICIES[name](replay)))
            task.advance(1)
    return outcomes


def require_resident(resident: int, trace: Trace) -> None:
    """Refuse a number of rows a layer that no policy can replay.

    Raises:
        InputError: not between the experts a token chooses and the experts there are.
    """
    if not trace.top_k <= resident <= trace.experts:
        raise InputError(
            f"{resident} experts per layer in VRAM",
            where="--resident",
            remedy=f"give a number from {trace.top_k} to {trace.experts}",
        )


def _outcome(name: str, replay: Replay, moves: Moves) -> Outcome:
    trace, s = replay.trace, replay.settings
    selections = trace.ids.size
    copied = int(moves.fetched.sum()) + moves.swapped  # rows copied to VRAM; as many go back to the host
    read_in_place = int(moves.missed.sum() - moves.fetched.sum())
    return Outcome(
        policy=name,
        resident=s.resident,
        hit_rate=1 - float(moves.missed.sum()) / selections,
        mass_hit_rate=None if moves.missed_mass is None else 1 - moves.missed_mass,
        host_bytes_per_token=(read_in_place + copied) * s.row_bytes / trace.tokens,
        moved_bytes_per_token=copied * s.row_bytes / trace.tokens,
        ms_per_token=_seconds_per_token(replay, moves) * 1e3,
    )


def _seconds_per_token(replay: Replay, moves: Moves) -> float:
    """Fetches first, then one launch per layer that reads VRAM rows and host rows at the same time.

    Rows go back to the host while others come: the link is full duplex. Swaps beside the steps share the
    link with the kernels, so their time is added in full, which is the worst case.
    """
    s, trace = replay.settings, replay.trace
    in_place = moves.missed - moves.fetched
    link = s.row_bytes / s.link_rate
    layer = moves.fetched * link + np.maximum(
        in_place * link, (trace.top_k - in_place) * (s.row_bytes / s.device_rate)
    )
    return float(layer.sum()) / trace.tokens + moves.swapped * link / trace.tokens


def _static(replay: Replay, resident: NDArray[np.bool_]) -> Moves:
    trace = replay.trace
    missed = ~resident[np.arange(trace.layers)[None, :, None], trace.ids]  # [T, L, K]
    return Moves(missed.sum(axis=2), np.zeros(missed.shape[:2], np.int64), 0, _mass(trace, missed))


def _static_count(replay: Replay) -> Moves:
    return _static(replay, hottest(replay.count, _equal(replay)))


def _static_mass(replay: Replay) -> Moves:
    return _static(replay, hottest(replay.mass, _equal(replay)))


def _static_budgets(replay: Replay) -> Moves:
    return _static(replay, hottest_overall(replay.count, replay.total))


def _lru(replay: Replay) -> Moves:
    """A row is in VRAM if it is among its layer's `resident` last used; the profile orders what was never used."""
    trace, size = replay.trace, replay.settings.resident
    layers = np.arange(trace.layers)[:, None]
    ranks = np.argsort(np.argsort(replay.count, axis=1, kind="stable"), axis=1)  # [L, E], coldest first
    used = ranks - trace.experts  # before the first token
    clock = np.arange(trace.top_k)
    missed = np.empty(trace.ids.shape, bool)
    for t, ids in enumerate(trace.ids):
        oldest = np.partition(used, -size, axis=1)[:, -size]  # [L]
        missed[t] = used[layers, ids] < oldest[:, None]
        used[layers, ids] = t * trace.top_k + clock
    count = missed.sum(axis=2)
    return Moves(count, count, 0, _mass(trace, missed))


def _lfu(replay: Replay) -> Moves:
    """Decayed counts, warm from the profile; the lowest in VRAM makes room for a missed row that exceeds it."""
    trace, s = replay.trace, replay.settings
    layers = np.arange(trace.layers)[:, None]
    tie = np.arange(trace.experts) * 1e-12  # makes counts distinct
    score = replay.count * (s.half_life / np.log(2)) + tie  # the steady state of counting at these rates
    resident = hottest(replay.count, _equal(replay))
    gain, growth = 1.0, 2.0 ** (1 / s.half_life)  # instead of decaying all scores, new counts weigh more
    missed = np.empty(trace.ids.shape, bool)
    fetched = np.zeros((trace.tokens, trace.layers), np.int64)
    for t, ids in enumerate(trace.ids):
        missed[t] = ~resident[layers, ids]
        gain *= growth
        score[layers, ids] += gain
        candidates = resident.copy()
        candidates[layers, ids] = True
        kept = np.where(candidates, score, -np.inf)
        lowest = np.partition(kept, -s.resident, axis=1)[:, -s.resident]
        now = kept >= lowest[:, None]
        fetched[t] = (now & ~resident).sum(axis=1)
        resident = now
        if gain > 1e100:
            score, gain = score / gain, 1.0
    return Moves(missed.sum(axis=2), fetched, 0, _mass(trace, missed))


def _prior_and_swaps(replay: Replay) -> Moves:
    trace, s = replay.trace, replay.settings
    tracker = HeatTracker(replay.count, prior_tokens=s.prior_tokens, half_life=s.half_life)
    resident = hottest_overall(replay.count, replay.total)
    missed = np.empty(trace.ids.shape, bool)
    layers = np.arange(trace.layers)[None, :, None]
    swapped = 0
    for start in range(0, trace.tokens, s.interval):
        part = trace.ids[start : start + s.interval]
        missed[start : start + s.interval] = ~resident[layers, part]
        tracker.add(Trace(part, None, trace.experts).counts(), len(part))
        promote, demote = choose_swaps(
            tracker.rates().ravel(), resident.ravel(), s.swaps, gain=1 / s.half_life
        )
        flat = resident.ravel()
        flat[promote], flat[demote] = True, False
        resident = flat.reshape(resident.shape)
        swapped += len(promote)
    count = missed.sum(axis=2)
    return Moves(count, np.zeros_like(count), swapped, _mass(trace, missed))


POLICIES: dict[str, Policy] = {
    "static count": _static_count,
    "static mass": _static_mass,
    "static budgets": _static_budgets,
    "lru": _lru,
    "lfu": _lfu,
    "prior + swaps": _prior_and_swaps,
}


def _equal(replay: Replay) -> Counts:
    return np.full(replay.trace.layers, replay.settings.resident)


def _mass(trace: Trace, missed: NDArray[np.bool_]) -> float | None:
    if trace.weights is None:
        return None
    return float(trace.weights[missed].sum() / trace.weights.sum())


def require_figure(file: Path) -> None:
    """Refuse a plot's file that is neither PNG nor SVG, or that holds something else than such a plot.

    Raises:
        InputError: as said.
    """
    if file.suffix.lower() not in _FORMATS:
        raise InputError("is neither PNG nor SVG", where=file, remedy="give a name that ends in .png or .svg")
    holds(file, "plot of q38 plan", begins_with(_MARK))


def plot(outcomes: Sequence[Outcome], file: Path) -> None:
    """Hit rate and predicted time against the experts in VRAM, one line per policy, as PNG or SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name in dict.fromkeys(o.policy for o in outcomes):
        points = sorted((o for o in outcomes if o.policy == name), key=lambda o: o.resident)
        x = [o.resident for o in points]
        axes[0].plot(x, [o.hit_rate for o in points], marker="o", label=name)
        axes[1].plot(x, [o.ms_per_token for o in points], marker="o", label=name)
    for axis, label in zip(axes, ("hit rate", "predicted ms per token, routed experts"), strict=True):
        axis.set(xlabel="experts per layer in VRAM", ylabel=label)
        axis.grid(alpha=0.3)
    axes[0].legend()
    suffix = file.suffix.lower()
    buffer = io.BytesIO()
    figure.savefig(buffer, format=suffix[1:], metadata={_FORMATS[suffix]: _MARK})
    with atomic_file(file) as out:
        out.write(buffer.getvalue())
    pyplot.close(figure)
