"""The plots of a report, as SVG that takes its text colour from the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from q38.measure.figures import BLUE, ORANGE, drawing

Floats = npt.NDArray[np.float64]


def layer_error_plot(layers: Sequence[dict[str, Any]], kinds: Sequence[str]) -> str:
    """Relative error of each block's output, with the noise floor below it.

    Args:
        layers: {"layer", "relative_error", "floor"} per block.
        kinds: layer type per block; sparse-attention blocks get their own marker.
    """
    index = [int(row["layer"]) for row in layers]
    error = [float(row["relative_error"]) for row in layers]
    floor = [float(row["floor"]) for row in layers]
    with drawing() as plot:
        axes = plot.axes
        axes.plot(index, error, color=BLUE, lw=1.5, zorder=2)
        for kind, marker, label in (
            ("linear_attention", "o", "Gated DeltaNet block"),
            ("full_attention", "s", "sparse attention block"),
        ):
            own = [i for i in index if kinds[i] == kind]
            axes.plot(
                own,
                [error[index.index(i)] for i in own],
                marker,
                color=BLUE,
                ms=5.5,
                label=label,
                mfc=_fill(marker),
            )
        if any(floor):
            axes.plot(index, floor, color=ORANGE, lw=1.5, ls="--", label="noise floor")
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("block")
        axes.set_ylabel("relative error of the output")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="best")
    return plot.svg


def coverage_plot(mass: Floats) -> str:
    """Share of the routing that the S busiest experts of each layer take, against S.

    Args:
        mass: [layers, experts] selections, or gate mass.
    """
    share = _cumulative(mass)  # [L, E + 1]
    experts = mass.shape[1]
    slots = np.arange(experts + 1)
    with drawing() as plot:
        axes = plot.axes
        axes.fill_between(slots, share.min(0), share.max(0), color=BLUE, alpha=0.2, lw=0, label="all layers")
        axes.plot(slots, share.mean(0), color=BLUE, lw=1.8, label="mean of the layers")
        axes.plot([0, experts], [0, 1], color=ORANGE, lw=1.2, ls="--", label="even routing")
        axes.set_xlim(0, experts)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("S, experts of a layer in GPU memory")
        axes.set_ylabel("share of selections covered")
        axes.legend(loc="lower right")
    return plot.svg


def routing_map(mass: Floats) -> str:
    """Share of each layer's selections per expert, busiest first; one row per layer, as multiples of even routing."""
    ordered = -np.sort(-mass, axis=1)
    total = ordered.sum(1, keepdims=True)
    ratio = np.divide(ordered, total, out=np.zeros_like(ordered), where=total > 0) * mass.shape[1]
    with drawing() as plot:
        axes = plot.axes
        image = axes.imshow(ratio, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        bar = plot.figure.colorbar(image, ax=axes)
        bar.set_label("times an even share")
        bar.outline.set_visible(False)
        axes.set_xlabel("expert, by rank within its layer")
        axes.set_ylabel("layer")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
    return plot.svg


def _cumulative(mass: Floats) -> Floats:
    ordered = -np.sort(-mass, axis=1)
    total = np.maximum(ordered.sum(1, keepdims=True), 1e-300)
    share = np.cumsum(ordered, axis=1) / total
    return np.concatenate([np.zeros((len(mass), 1)), share], axis=1)  # [L, E + 1]


def _fill(marker: str) -> str:
    return BLUE if marker == "o" else "none"
