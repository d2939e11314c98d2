"""The quality part as files for people: Markdown, JSON, and plots as SVG."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from q38.base.units import format_bytes, format_seconds
from q38.checkpoint.writer import FileRecord, atomic_file, write_json
from q38.measure.quality import KL, TOP1

_BLUE, _ORANGE = "#2f7fc1", "#d97a1a"


def write_report(out: Path, document: Mapping[str, Any], *, names: tuple[str, str]) -> dict[str, FileRecord]:
    """Write quality.json, quality.md, and the plots it shows.

    Args:
        document: the quality part, `Part.to_dict`.
        names: of model and source, for the title.

    Returns:
        File name -> record.
    """
    files = {"quality.json": write_json(out / "quality.json", document)}
    plots = {"layers.svg": _layer_plot(document["layers"])}
    for kind, rows in document["by"].items():
        plots[f"{kind.replace(' ', '-')}.svg"] = _label_plot(rows, kind)
    for name, svg in plots.items():
        files[name] = _write_text(out / name, svg)
    text = "\n".join(_markdown(document, names, list(plots))) + "\n"
    files["quality.md"] = _write_text(out / "quality.md", text)
    return files


def _markdown(document: Mapping[str, Any], names: tuple[str, str], plots: Sequence[str]) -> Iterator[str]:
    text, memory = document["text"], document["memory"]
    yield f"# Quality of {Path(names[0]).name} against {Path(names[1]).name}"
    yield ""
    yield (
        f"{document['positions']:,} positions in {document['sequences']} sequences of {document['seqlen']} tokens;"
        f" {text['origin']}. Arithmetic in {document['dtype']} on {document['device']},"
        f" {format_seconds(document['seconds'])}, at most {format_bytes(memory['peak'])} of host memory."
    )
    yield f"Standard errors are clustered by sequence. Noise floor: {document['floor']['kind']}."
    yield ""
    floor = document["floor"]
    yield from _table(
        ["measure", "value", "standard error", "noise floor"],
        [
            [c["name"], c["value"], c["standard_error"], (floor.get(c["name"]) or {}).get("value")]
            for c in document["checks"]
        ],
    )
    quantiles = ", ".join(f"{q}: {_cell(value)}" for q, value in document["kl_quantiles"].items())
    yield f"Quantiles of the KL divergence over positions: {quantiles}."
    for kind, rows in document["by"].items():
        yield ""
        yield f"## By {kind}"
        yield ""
        yield from _table(
            [kind, "positions", "nll, source", "nll", KL, "standard error", "noise floor", TOP1, "top-5 agreement"],
            [
                [r["name"], r["positions"], r["nll, source"]["value"], r["nll"]["value"], r[KL]["value"],
                 r[KL]["standard_error"], r["floor"]["value"], r[TOP1]["value"], r["top-5 agreement"]["value"]]
                for r in rows
            ],
        )  # fmt: skip
    yield "## By block"
    yield ""
    yield "Relative error of a block's output: drift with the errors of the blocks before it, own without."
    yield ""
    yield from _table(
        ["block", "drift", "standard error", "noise floor", "own"],
        [
            [r["layer"], r["relative_error"], r["standard_error"], r["floor"], r["own"]]
            for r in document["layers"]
        ],
    )
    yield from (f"![{Path(name).stem}]({name})" for name in plots)


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"
    yield ""


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return (
        f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    )


def _layer_plot(layers: Sequence[Mapping[str, Any]]) -> str:
    """Drift, own error and noise floor of each block."""
    figure, axes = _figure()
    index = [row["layer"] for row in layers]
    for key, label, color, style in (
        ("relative_error", "drift", _BLUE, "o-"),
        ("own", "own", _BLUE, "s:"),
        ("floor", "noise floor", _ORANGE, "--"),
    ):
        axes.plot(index, [row[key] or None for row in layers], style, color=color, label=label, ms=4)
    if any(row["floor"] for row in layers):
        axes.set_yscale("log")
    axes.set_xlabel("block")
    axes.set_ylabel("relative error of the output")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend()
    return _svg(figure)


def _label_plot(rows: Sequence[Mapping[str, Any]], kind: str) -> str:
    """KL divergence of each label with two standard errors, and its noise floor; labels of one sequence are left out."""
    figure, axes = _figure()
    rows = [row for row in rows if row[KL]["standard_error"] is not None] or rows
    places = list(range(len(rows)))
    errors = [2 * (row[KL]["standard_error"] or 0.0) for row in rows]
    axes.barh(
        places, [row[KL]["value"] for row in rows], xerr=errors, color=_BLUE, ecolor="black", height=0.6
    )
    axes.plot(
        [row["floor"]["value"] for row in rows], places, "|", color=_ORANGE, ms=14, mew=2, label="noise floor"
    )
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"KL divergence by {kind}, nats")
    axes.legend()
    return _svg(figure)


def _figure() -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.4), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Any) -> str:
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "q38"}):  # same data, same bytes
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _write_text(path: Path, text: str) -> FileRecord:
    with atomic_file(path) as f:
        f.write(text.encode())
    return f.record()
