"""What difference a change may make: three classes of change, their published limits, and the measured noise.

host     no arithmetic on the device changed; the scores are the same but for noise
kernel   the order of summation changed; deep layers differ through routing near ties, so the mean may be
         larger, but each layer must agree on identical inputs
approx   the numbers changed on purpose (a KV format, a weight format); judged by the change of the NLL
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from q38.base.errors import InputError

Class = Literal["host", "kernel", "approx"]


@dataclass(frozen=True)
class Limits:
    """In nats; None = not judged. mean, max: of |difference|. nll: |difference of the mean NLL|.

    layer: relative error of a block's output on the reference's input, with no unit.
    """

    mean: float | None = None
    max: float | None = None
    nll: float | None = None
    layer: float | None = None

    def to_dict(self) -> dict[str, float | None]:
        return dict(vars(self))


# REPORTED limits of earlier public work on this model.
PUBLISHED: Mapping[Class, Limits] = {
    "host": Limits(mean=0.01, max=0.5),
    "kernel": Limits(mean=0.05, layer=1e-3),
    "approx": Limits(nll=0.005),
}
# The published limits stand at this many times the noise of the server that they were found on
# (REPORTED: mean 0.002, max 0.09 nats). A limit below it would fail a server that did not change.
ABOVE_NOISE = 5.0


def limits_of(
    kind: Class,
    noise: Mapping[str, Any],
    *,
    max_mean: float | None = None,
    max_abs: float | None = None,
    max_nll: float | None = None,
    times_noise: float | None = None,
) -> Limits:
    """The limits of one check.

    Args:
        noise: {"mean", "max", "nll"} of repeated runs, in nats.
        max_mean, max_abs, max_nll: given by hand; they win.
        times_noise: so many times the noise, instead of the published limits.

    Raises:
        InputError: no such class, or a limit that is not positive.
    """
    if kind not in PUBLISHED:
        raise InputError(f"unknown class '{kind}'", where="--class", remedy=f"known: {', '.join(PUBLISHED)}")
    for option, value in (("--max-mean", max_mean), ("--max-abs", max_abs), ("--max-nll", max_nll)):
        if value is not None and not value > 0:
            raise InputError(f"{value} is not positive", where=option, remedy="give nats, for example 0.01")
    if times_noise is not None and not times_noise > 0:
        raise InputError(f"{times_noise} is not positive", where="--times-noise", remedy="write 5")
    published = PUBLISHED[kind]

    def limit(name: str, given: float | None, default: float | None) -> float | None:
        if given is not None or default is None:
            return given
        measured = float(noise.get(name) or 0.0)
        if times_noise is not None:
            return times_noise * measured
        return max(default, ABOVE_NOISE * measured)

    return Limits(
        mean=limit("mean", max_mean, published.mean),
        max=limit("max", max_abs, published.max),
        nll=limit("nll", max_nll, published.nll),
        layer=published.layer,
    )
