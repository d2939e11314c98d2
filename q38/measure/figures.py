"""Plots as SVG: in a page they take the page's text colour, alone they follow the reader's light or dark mode."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

# Told apart by colour-blind eyes too (Okabe and Ito's palette, a little darker), readable on white and on black.
BLUE, ORANGE, GREEN, PINK = "#2f7fc1", "#d97a1a", "#1f9e77", "#c25a96"
COLOURS = (BLUE, ORANGE, GREEN, PINK, "#8a8f20", "#7a6fd0", "#4fa8c9")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_INK = "#010203"  # stands for the page's text colour; replaced in the SVG
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
    "grid.color": _INK,
    "grid.alpha": 0.15,
    "savefig.transparent": True,
}
_ALONE = "<style>svg{color:#1b1f24}@media (prefers-color-scheme:dark){svg{color:#e4e8ec}}</style>"


@dataclass
class Drawing:
    """One plot: matplotlib's figure and axes inside the `with`, its SVG after it."""

    figure: Any
    axes: Any
    svg: str = field(default="", init=False)


@contextmanager
def drawing(width: float = 5.2, height: float = 3.1) -> Iterator[Drawing]:
    """A plot of the given size in inches, which only sets its proportions and how large its text is beside it."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        plot = Drawing(figure, figure.add_subplot())
        yield plot
        plot.svg = _svg(figure)


def standalone(svg: str) -> str:
    """The SVG as a file of its own."""
    head, tail = svg.split(">", 1)
    return f"{head}>{_ALONE}{tail}"


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, count=1, flags=re.DOTALL)
    # The page sets the width; the viewBox keeps the proportions.
    return re.sub(r' (?:width|height)="[\d.]+pt"', "", text, count=2)
