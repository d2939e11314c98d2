"""The plots of a benchmark: what a reader compares, one quantity a plot, units on every axis."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from q38.measure.bench.plan import COLD, WARM
from q38.measure.figures import BLUE, COLOURS, MARKERS, ORANGE, drawing

Cells = Sequence[Mapping[str, Any]]
_SIZE = (5.0, 3.3)
_VERDICT_COLOURS = {"slower": "#c62f2f", "not slower": "#1a7f37", "undecided": "#8a8f98"}


def bench_plots(result: Mapping[str, Any]) -> dict[str, str]:
    """Name -> SVG. A plot that would hold a single point is left out."""
    cells: Cells = result["cells"]
    plots = {}
    if len({c["depth"] for c in cells}) > 1:
        plots["first-token"] = first_token_plot(cells)
        plots["decode"] = decode_plot(cells)
    if len({c["concurrency"] for c in cells}) > 1:
        plots["throughput"] = throughput_plot(cells)
    if any(c["between_tokens_ms"] for c in cells):
        plots["between-tokens"] = between_tokens_plot(cells)
    if result.get("comparison"):
        plots["comparison"] = comparison_plot(result["comparison"])
    return plots


def first_token_plot(cells: Cells) -> str:
    """Time to first token against prompt length, cold and warm; each round is a faint dot."""
    with drawing(*_SIZE) as plot:
        fewest = min(c["concurrency"] for c in cells)
        for prefix, colour, marker in ((COLD, BLUE, "o"), (WARM, ORANGE, "s")):
            own = [c for c in cells if c["prefix"] == prefix and c["concurrency"] == fewest]
            _line(plot.axes, own, "first_token_s", colour, marker, f"{prefix} prefix")
        _depth_axis(plot.axes, cells)
        _log_axis(
            plot.axes.yaxis, plot.axes.set_ylim, [v for c in cells for v in _rounds(c, "first_token_s")]
        )
        plot.axes.set_ylabel("time to first token, s")
        plot.axes.legend()
    return plot.svg


def decode_plot(cells: Cells) -> str:
    """Decode tokens/s of one request against prompt length, one line for each number of requests at once."""
    with drawing(*_SIZE) as plot:
        for i, n in enumerate(sorted({c["concurrency"] for c in cells})):
            own = [c for c in cells if c["concurrency"] == n and c["prefix"] == COLD]
            own = own or [c for c in cells if c["concurrency"] == n]
            label = "one request" if n == 1 else f"{n} at once, each"
            _line(
                plot.axes,
                own,
                "decode_tokens_per_s",
                COLOURS[i % len(COLOURS)],
                MARKERS[i % len(MARKERS)],
                label,
            )
        plot.axes.set_ylim(bottom=0)
        _depth_axis(plot.axes, cells)
        plot.axes.set_ylabel("decode, tokens/s")
        plot.axes.legend()
    return plot.svg


def throughput_plot(cells: Cells) -> str:
    """Generated tokens/s of all requests together against their number, one line a prompt length."""
    with drawing(*_SIZE) as plot:
        axes = plot.axes
        for i, depth in enumerate(sorted({c["depth"] for c in cells})):
            own = [c for c in cells if c["depth"] == depth and c["prefix"] == COLD]
            axes.plot(
                [c["concurrency"] for c in own],
                [c["output_tokens_per_s"] for c in own],
                color=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                label=f"depth {depth:,}",
            )
        axes.set_xticks(sorted({c["concurrency"] for c in cells}))
        axes.set_xlabel("requests at once")
        axes.set_ylabel("all output, tokens/s, prefill included")
        axes.set_ylim(bottom=0)
        axes.grid(axis="y")
        axes.legend()
    return plot.svg


def between_tokens_plot(cells: Cells) -> str:
    """Time between tokens of each cell: median, 90th and 99th percentile."""
    own = [c for c in cells if c["between_tokens_ms"]]
    with drawing(_SIZE[0], 1.2 + 0.3 * len(own)) as plot:
        axes, rows = plot.axes, range(len(own))
        times = [c["between_tokens_ms"] for c in own]
        axes.hlines(rows, [t["p50"] for t in times], [t["p99"] for t in times], color=BLUE, lw=2, alpha=0.4)
        for name, marker, colour, label in (
            ("p50", "o", BLUE, "median"),
            ("p90", "|", ORANGE, "90 %"),
            ("p99", "D", ORANGE, "99 %"),
        ):
            values = [t[name] for t in times]
            axes.plot(values, rows, marker, color=colour, ms=6, mew=2, label=label, zorder=3)
        _row_axis(axes, [_short(c) for c in own])
        _log_axis(axes.xaxis, axes.set_xlim, [t[name] for t in times for name in ("p50", "p99")])
        axes.set_xlabel("time between tokens, ms")
        plot.figure.legend(loc="outside upper right", ncols=3, columnspacing=1, handletextpad=0.2)
    return plot.svg


def comparison_plot(comparison: Mapping[str, Any]) -> str:
    """Each ratio with its interval, and the gate. Intervals that leave the plot end in an arrow."""
    rows = comparison["rows"]
    low, high = 0.75, 1.25
    with drawing(5.6, 1.2 + 0.24 * len(rows)) as plot:
        axes = plot.axes
        for i, row in enumerate(rows):
            colour = _VERDICT_COLOURS[row["verdict"]]
            axes.plot([max(row["low"], low), min(row["high"], high)], [i, i], color=colour, lw=2)
            for beyond, at, marker in ((row["low"] < low, low, "<"), (row["high"] > high, high, ">")):
                if beyond:
                    axes.plot(at, i, marker, color=colour, ms=5, clip_on=False)
            if low <= row["ratio"] <= high:
                axes.plot(row["ratio"], i, "o", color=colour, ms=5)
        axes.axvline(comparison["gate"], color=ORANGE, ls="--", lw=1.2, label=f"gate {comparison['gate']:g}")
        axes.axvline(1, color=BLUE, lw=1, label="as fast as before")
        axes.set_xlim(low, high)
        cells = [row["cell"].replace("depth ", "").replace(" prefix", "") for row in rows]
        _row_axis(axes, [f"{cell}: {row['speed']}" for cell, row in zip(cells, rows, strict=True)])
        axes.set_xlabel("new speed / old speed")
        plot.figure.legend(loc="outside upper right", ncols=2, columnspacing=1)
    return plot.svg


def _short(cell: Mapping[str, Any]) -> str:
    together = f" x {cell['concurrency']}" if cell["concurrency"] > 1 else ""
    return f"{cell['depth']:,}{together}, {cell['prefix']}"


def _rounds(cell: Mapping[str, Any], name: str) -> list[float]:
    return [r[name] for r in cell["rounds"] if r[name] is not None]


def _log_axis(axis: Any, limit: Callable[[float, float], object], values: Sequence[float]) -> None:
    """A logarithmic axis that has plain numbers on it even where the values span less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    limit(min(values) / 1.6, max(values) * 1.6)
    close = max(values) < 30 * min(values)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if close else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.10g}"))


def _line(axes: Any, cells: Cells, name: str, colour: str, marker: str, label: str) -> None:
    """Medians joined by a line, and every round as a faint dot."""
    cells = sorted(cells, key=lambda c: c["depth"])
    points = [(c["prompt_tokens"], value) for c in cells for value in _rounds(c, name)]
    medians = [(c["prompt_tokens"], c[name]["p50"] if isinstance(c[name], dict) else c[name]) for c in cells]
    medians = [(x, y) for x, y in medians if y is not None]
    if not medians:
        return
    axes.plot(*zip(*points, strict=True), marker, color=colour, ms=4, alpha=0.35, mew=0)
    axes.plot(*zip(*medians, strict=True), marker=marker, color=colour, lw=1.6, ms=5.5, label=label)


def _depth_axis(axes: Any, cells: Cells) -> None:
    axes.set_xscale("log", base=2)
    depths = sorted({c["depth"] for c in cells})
    axes.set_xticks(depths, [f"{d:,}" for d in depths])
    axes.minorticks_off()
    axes.set_xlabel("prompt length, tokens")
    axes.grid(axis="y")


def _row_axis(axes: Any, labels: Sequence[str]) -> None:
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
