"""Which experts of each layer live in device memory, and how much routing they cover.

Experts are ranked by selection count, or by smoothed rate where a profile has one; gate mass breaks ties, then the lower index. How many a layer
keeps is either the same for all (S each), or follows the marginal gain: each slot of a total budget
goes to the expert that the trace selects most often, whatever its layer. Every layer selects the same
number of experts per token, so counts compare across layers, and no other choice of as many experts
covers more of the trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from q38.base.errors import InputError
from q38.residency.heat import hottest, hottest_overall
from q38.residency.profile import Profile

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Coverage:
    """Share of a trace's routing that the resident experts take: of selections, of gate mass, of the worst layer."""

    selections: float
    mass: float
    worst_layer: float

    def to_dict(self) -> dict[str, float]:
        return dict(vars(self))


def heat(profile: Profile) -> npt.NDArray[np.float64]:
    """float64 [L, E] that orders experts by selections (the smoothed ones of a smoothed profile), then by gate mass."""
    if profile.rate is not None:
        # Far below the difference of two rates, except where counts and prior are the same.
        mass = profile.mass / max(float(profile.mass.max(initial=0)), 1e-300)
        return np.asarray(profile.rate * profile.tokens + 1e-6 * mass, dtype=np.float64)
    # A selection has a gate weight of at most 1, so the second term stays below 1 and only breaks ties.
    ties = profile.mass / (float(profile.count.max(initial=0)) + 1)
    return np.asarray(profile.count + ties, dtype=np.float64)


def equal_placement(profile: Profile, per_layer: int) -> Mask:
    """The `per_layer` most selected experts of each layer: bool [L, E]."""
    _require_slots(per_layer, profile.experts, "resident experts per layer")
    return hottest(heat(profile), np.full(profile.layers, per_layer, dtype=np.int64))


def marginal_placement(profile: Profile, slots: int) -> Mask:
    """The `slots` most selected experts of all layers, each layer getting its share by marginal gain: bool [L, E]."""
    _require_slots(slots, profile.count.size, "slots")
    return hottest_overall(heat(profile), slots)


def coverage(mask: Mask, trace: Profile) -> Coverage:
    """How much of `trace` the resident experts `mask` [L, E] cover."""
    per_layer = trace.count.sum(1)
    hits = (trace.count * mask).sum(1)
    worst = np.divide(hits, per_layer, out=np.ones(len(hits)), where=per_layer > 0).min()
    return Coverage(
        float(hits.sum() / max(per_layer.sum(), 1)),
        float((trace.mass * mask).sum() / max(trace.mass.sum(), 1e-300)),
        float(worst),
    )


def held_out_coverage(halves: tuple[Profile, Profile], per_layer: int) -> dict[str, Any]:
    """Coverage at S experts per layer, built on one half of a trace and tested on the other, both ways.

    Returns:
        {"resident", "even", "built": {...}, "equal": {...}, "budgets": {...}, "smallest", "largest"}:
        `even` is the share that even routing would give, `built` equal S on the half it was built
        on, `equal` and `budgets` on the other half; the last two are the ends of the per-layer budgets.
    """
    rows: dict[str, list[Coverage]] = {"built": [], "equal": [], "budgets": []}
    sizes = []
    for built, tested in (halves, halves[::-1]):
        equal = equal_placement(built, per_layer)
        budgets = marginal_placement(built, per_layer * built.layers)
        rows["built"].append(coverage(equal, built))
        rows["equal"].append(coverage(equal, tested))
        rows["budgets"].append(coverage(budgets, tested))
        sizes.append(budgets.sum(1))
    return {
        "resident": per_layer,
        "even": per_layer / halves[0].experts,
        **{name: _mean(found).to_dict() for name, found in rows.items()},
        "smallest": int(np.min(sizes)),
        "largest": int(np.max(sizes)),
    }


def own_coverage(profile: Profile, per_layer: int) -> dict[str, Any]:
    """As `held_out_coverage` where nothing is held out: `built` alone, `equal` and `budgets` None."""
    budgets = marginal_placement(profile, per_layer * profile.layers).sum(1)
    return {
        "resident": per_layer,
        "even": per_layer / profile.experts,
        "built": coverage(equal_placement(profile, per_layer), profile).to_dict(),
        "equal": None,
        "budgets": None,
        "smallest": int(budgets.min()),
        "largest": int(budgets.max()),
    }


def default_sizes(experts: int) -> list[int]:
    """Values of S worth looking at: 1/16 to 3/4 of the experts, rounded, each once."""
    return sorted({max(round(experts * part / 16), 1) for part in (1, 2, 3, 4, 5, 6, 8, 10, 12)})


def _mean(found: list[Coverage]) -> Coverage:
    values = np.array([list(c.to_dict().values()) for c in found])
    selections, mass, worst = values.mean(0).tolist()
    return Coverage(selections, mass, worst)


def _require_slots(slots: int, available: int, what: str) -> None:
    if not 0 <= slots <= available:
        raise InputError(f"{slots} {what}, there are {available} experts", remedy=f"give 0 to {available}")
