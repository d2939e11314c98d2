"""The plots of a report, as SVG that takes its text colour from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

_INK = "#010203"  # stands for the page's text colour; replaced in the SVG
_BLUE, _ORANGE = "#2f7fc1", "#d97a1a"  # readable on white and on black
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "q38",  # same data, same bytes
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.edgecolor": _INK,
    "axes.labelcolor": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "savefig.transparent": True,
}


def layer_error_plot(layers: Sequence[dict[str, Any]], kinds: Sequence[str]) -> str:
    """Relative error of each block's output, with the noise floor below it.

    Args:
        layers: {"layer", "relative_error", "floor"} per block.
        kinds: layer type per block; sparse-attention blocks get their own marker.
    """
    index = [int(row["layer"]) for row in layers]
    error = [float(row["relative_error"]) for row in layers]
    floor = [float(row["floor"]) for row in layers]
    with _figure() as (figure, axes, result):
        axes.plot(index, error, color=_BLUE, lw=1.5, zorder=2)
        for kind, marker, label in (
            ("linear_attention", "o", "Gated DeltaNet block"),
            ("full_attention", "s", "sparse attention block"),
        ):
            own = [i for i in index if kinds[i] == kind]
            axes.plot(
                own,
                [error[index.index(i)] for i in own],
                marker,
                color=_BLUE,
                ms=5.5,
                label=label,
                mfc=_fill(marker),
            )
        if any(floor):
            axes.plot(index, floor, color=_ORANGE, lw=1.5, ls="--", label="noise floor")
            axes.set_yscale("log")
        else:
            axes.set_ylim(bottom=0)
        axes.set_xlabel("block")
        axes.set_ylabel("relative error of the output")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.legend(loc="best")
        result["svg"] = _svg(figure)
    return result["svg"]


def coverage_plot(mass: Floats) -> str:
    """Share of the routing that the S busiest experts of each layer take, against S.

    Args:
        mass: [layers, experts] selections, or gate mass.
    """
    share = _cumulative(mass)  # [L, E + 1]
    experts = mass.shape[1]
    slots = np.arange(experts + 1)
    with _figure() as (figure, axes, result):
        axes.fill_between(slots, share.min(0), share.max(0), color=_BLUE, alpha=0.2, lw=0, label="all layers")
        axes.plot(slots, share.mean(0), color=_BLUE, lw=1.8, label="mean of the layers")
        axes.plot([0, experts], [0, 1], color=_ORANGE, lw=1.2, ls="--", label="even routing")
        axes.set_xlim(0, experts)
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("S, experts of a layer in GPU memory")
        axes.set_ylabel("share of selections covered")
        axes.legend(loc="lower right")
        result["svg"] = _svg(figure)
    return result["svg"]


def routing_map(mass: Floats) -> str:
    """Share of each layer's selections per expert, busiest first; one row per layer, as multiples of even routing."""
    ordered = -np.sort(-mass, axis=1)
    total = ordered.sum(1, keepdims=True)
    ratio = np.divide(ordered, total, out=np.zeros_like(ordered), where=total > 0) * mass.shape[1]
    with _figure() as (figure, axes, result):
        image = axes.imshow(ratio, aspect="auto", interpolation="nearest", cmap="viridis", vmin=0)
        bar = figure.colorbar(image, ax=axes)
        bar.set_label("times an even share")
        bar.outline.set_visible(False)
        axes.set_xlabel("expert, by rank within its layer")
        axes.set_ylabel("layer")
        axes.yaxis.get_major_locator().set_params(integer=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        result["svg"] = _svg(figure)
    return result["svg"]


def _cumulative(mass: Floats) -> Floats:
    ordered = -np.sort(-mass, axis=1)
    total = np.maximum(ordered.sum(1, keepdims=True), 1e-300)
    share = np.cumsum(ordered, axis=1) / total
    return np.concatenate([np.zeros((len(mass), 1)), share], axis=1)  # [L, E + 1]


def _fill(marker: str) -> str:
    return _BLUE if marker == "o" else "none"


@contextmanager
def _figure() -> Iterator[tuple[Any, Any, dict[str, str]]]:
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 3.4), layout="constrained")
        yield figure, figure.add_subplot(), {}


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    # The page sets the width; the viewBox keeps the proportions.
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
