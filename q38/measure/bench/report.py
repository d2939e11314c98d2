"""A benchmark for readers: report.md with plots beside it, and report.html, one page that needs no network."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from q38.checkpoint.writer import atomic_file, writing
from q38.measure.bench.plots import bench_plots
from q38.measure.bench.tables import (
    cell_table,
    comparison_table,
    markdown,
    notes,
    ran_on,
    verdict_line,
)
from q38.measure.figures import standalone
from q38.measure.page import render_page

CAPTIONS = {
    "first-token": "Time to first token. Lines join medians, dots are rounds.",
    "decode": "Decode tokens/s of one request at the depth of its prompt.",
    "throughput": "Tokens/s of all requests together.",
    "between-tokens": "Time between tokens, from the median to the 99th percentile.",
    "comparison": "New speed / old speed with its interval; a row is slower where all of it lies below the gate.",
}


def write_bench_report(directory: Path, result: Mapping[str, Any]) -> list[Path]:
    """Write report.md, one SVG a plot, and report.html. Returns the files.

    Raises:
        InputError, ResourceError: they cannot be written.
    """
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
    plots = bench_plots(result)
    files = {f"{name}.svg": standalone(svg) for name, svg in plots.items()}
    files |= {"report.md": markdown_report(result, list(plots)), "report.html": html_report(result, plots)}
    for name, text in files.items():
        with atomic_file(directory / name) as f:
            f.write(text.encode())
    return [directory / name for name in files]


def markdown_report(result: Mapping[str, Any], plots: list[str]) -> str:
    """The report as Markdown; `plots` are the names of the SVG files beside it."""
    settings = result["settings"]
    parts = [f"# Speed of {result['server']['model']}", ran_on(result)]
    parts.append(
        f"{result['kind']} {result['when']} with q38 {result['q38']}; medians of {settings['repeats']} rounds, "
        f"{settings['max_tokens']} tokens an answer, text {result['text']['sha256'][:12]}:"
    )
    parts += [f"    {result['command']}", markdown(cell_table(result)).rstrip()]
    parts += [f"- {note}" for note in notes(result)]
    parts += [f"![{CAPTIONS[name]}]({name}.svg)" for name in plots]
    comparison = result.get("comparison")
    if comparison:
        parts += ["## Comparison", _against(comparison), markdown(comparison_table(comparison)).rstrip()]
        parts += [f"Result: {verdict_line(comparison)}.", f"Intervals: {comparison['source']}."]
    return "\n\n".join(parts) + "\n"


def html_report(result: Mapping[str, Any], plots: Mapping[str, str]) -> str:
    """The report as one page."""
    comparison = result.get("comparison")
    return render_page(
        Path(__file__).with_name("report.html.jinja"),
        result=result,
        cells=cell_table(result),
        notes=notes(result),
        ran_on=ran_on(result),
        plots=plots,
        captions=CAPTIONS,
        comparison=comparison_table(comparison) if comparison else None,
        against=_against(comparison) if comparison else "",
        verdict=verdict_line(comparison) if comparison else "",
    )


def _against(comparison: Mapping[str, Any]) -> str:
    old = comparison["against"]
    text = f"Against {old['server']['model']} at {old['server']['url']}, {old['when']}"
    text += ", in turns, round by round." if comparison["paired"] else ", a stored run."
    if comparison["differences"]:
        text += f" Compared although they differ: {'; '.join(comparison['differences'])}."
    return text
