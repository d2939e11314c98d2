"""`q38 run`: the whole pipeline from one recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.base.units import format_bytes, format_seconds
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session


@app.command("run")
def run(
    recipe: Annotated[
        str, typer.Argument(help="Recipe file, or the name of a shipped one, for example tiny.")
    ],
    workdir: Annotated[
        Path,
        typer.Option(
            "--workdir", "-w", help="Directory of the run. The same command in the same directory goes on."
        ),
    ],
    source: Annotated[
        Path | None, typer.Option(help="Directory of the source checkpoint, instead of the recipe's source.")
    ] = None,
    fresh_from: Annotated[
        str | None,
        typer.Option(help="Redo this step and every later one, for example quantize.", metavar="STEP"),
    ] = None,
    fresh: FreshFlag = False,
    dry_run: DryRunFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Take a checkpoint through every step of a recipe, to a served and checked model and a report.

    Steps that are done and unchanged are skipped. A changed recipe, source or output is refused with the first difference.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.pipeline import run as pipeline

        if dry_run:
            document = pipeline.dry_run(recipe, workdir, source=source, fresh=fresh, fresh_from=fresh_from)
            console.table(
                ("step", "state", "bytes out", "command"), [list(row.values()) for row in document["steps"]]
            )
            for line in document["left_out"]:
                console.print(line)
            for lack in document["lacks"]:
                console.print(f"cannot be done here: {lack['step']}: {lack['what']}. {lack['remedy']}")
        else:
            document = pipeline.run(
                recipe, workdir, source=source, fresh=fresh, fresh_from=fresh_from, progress=console.progress
            )
            _print(console, document)
        console.emit(document)


def _print(console: Console, document: dict[str, Any]) -> None:
    rows = [
        (s["step"], format_seconds(s["seconds"]), format_bytes(s["bytes_in"]), format_bytes(s["bytes_out"]),
         format_bytes(s["peak_memory"]), "done now" if s["step"] in document["ran"] else "up to date")
        for s in document["steps"]
    ]  # fmt: skip
    console.table(("step", "time", "bytes in", "bytes out", "peak memory", "state"), rows)
    console.print(
        f"\n{format_seconds(document['seconds'])} in all, peak memory {format_bytes(document['peak_memory'])} "
        "(resident bytes summed over the processes of the run)"
    )
    if document["chat"]:
        console.print(f"\n{document['chat']['question']}\n{document['chat']['answer']}")
    for line in document["left_out"]:
        console.print(f"\n{line}")
    console.print(f"\nmodel:  {document['model']}\nreport: {document['report']}")
