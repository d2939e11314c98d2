"""`q38 inspect`: what a checkpoint holds and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from q38.base.errors import InputError
from q38.base.units import format_bytes
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, JsonFlag, session

if TYPE_CHECKING:
    from q38.inspection.report import Inspection


@app.command("inspect")
def inspect(
    source: Annotated[
        str | None, typer.Argument(metavar="SRC", help="Checkpoint directory, or a hub id (metadata only).")
    ] = None,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also read values: sha256 against MANIFEST.json, NaN, zero blocks, zero points."
        ),
    ] = False,
    codes: Annotated[bool, typer.Option("--codes", help="Print the table of finding codes and end.")] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show what a checkpoint holds and what is wrong with it, from config.json and tensor headers.

    Exit code 1 if any finding is an error.
    """
    with session(json_mode=json, debug=debug) as console:
        if codes:
            _print_codes(console)
            return
        if source is None:
            raise InputError("SRC is needed", remedy="run q38 inspect DIR")
        from q38.inspection.report import inspect

        result = inspect(source, deep=deep, progress=console.progress)
        console.emit(result.to_dict())
        _print_report(console, result)
        if not result.ok:
            console.fail()


def _print_codes(console: Console) -> None:
    from q38.inspection.findings import codes_table

    rows = codes_table()
    console.emit({"codes": [dict(zip(("code", "severity", "meaning"), row, strict=True)) for row in rows]})
    console.table(("code", "severity", "meaning"), rows)


def _print_report(console: Console, result: Inspection) -> None:
    opened, parts = result.opened, result.parts
    console.print(
        f"{result.source}: {result.layout}, experts {result.experts}, {len(opened.tensors):,} tensors, "
        f"{format_bytes(opened.nbytes)}"
    )
    console.print(
        "parts: " + ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in parts.items())
    )
    if result.ngram:
        console.print(
            f"n-gram table: {result.ngram['rows']:,} rows ({result.ngram['rows_expected']:,} expected) of "
            f"{result.ngram['dim']} {result.ngram['dtype']}, in {result.ngram['where']}"
        )
    console.table(
        ("group", "tensors", "parameters", "size", "dtypes"),
        [
            (
                g.group.value,
                g.tensors,
                g.parameters,
                format_bytes(g.nbytes),
                " ".join(d for d, _ in g.dtypes.most_common()),
            )
            for g in result.groups
        ],
    )
    if result.bits:
        console.table(
            ("bits", "matrices", "parameters", "size"),
            [(w, r["matrices"], r["parameters"], format_bytes(r["bytes"])) for w, r in result.bits.items()],
            title="matrices by width",
        )
    _print_findings(console, result)


def _print_findings(console: Console, result: Inspection) -> None:
    findings = result.findings
    for finding in findings.ordered():
        place = ": ".join(part for part in (finding.file, finding.tensor) if part)
        console.print(
            f"{finding.severity.value} {finding.code}: {place + ': ' if place else ''}{finding.what}. {finding.remedy}."
        )
    for code, count in findings.counts.items():
        if count > findings.limit:
            console.print(f"{code}: {count - findings.limit:,} more like these")
    if not findings.kept:
        console.print("nothing wrong")
