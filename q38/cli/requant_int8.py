"""`q38 requant-int8`: dense matrices of a quantized checkpoint to INT8."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.base.units import format_bytes
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session


@app.command("requant-int8")
def requant_int8(
    model: Annotated[
        Path,
        typer.Argument(metavar="MODEL", help="Checkpoint written by q38 quantize. It is not changed."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for the new checkpoint.")],
    source: Annotated[
        Path, typer.Option(help="The bf16 or FP8 release that MODEL was made from. It is not changed.")
    ],
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="The recipe of MODEL: a file, or the name of a shipped one.")
    ],
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Matrices rounded at a time. Default: all cores this process may use. The result is the same.",
        ),
    ] = None,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Re-pack the dense matrices that the recipe names to INT8, rounded from the source's weights.

    A matrix whose relative error exceeds the recipe's limit stays in 16 bit. Everything else is copied
    unchanged. A killed run resumes with the same command.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.quantize.requant_int8 import requant_int8
        from q38.recipe.schema import load_recipe

        result = requant_int8(
            model,
            out,
            source=source,
            recipe=load_recipe(recipe),
            threads=threads,
            dry_run=dry_run,
            fresh=fresh,
            progress=console.progress,
        )
        console.emit({"out": str(out), "dry_run": dry_run, **result})
        _matrices(console, result["matrices"], dry_run=dry_run)
        count, verb = len(result["matrices"]), "would hold" if dry_run else "holds"
        console.print(
            f"{out} {verb} {format_bytes(result['bytes'])} of tensors; {count} matrices re-packed to INT8"
        )
        for row in result["matrices"]:
            if row.get("kept"):
                console.print(f"stays in 16 bit: {row['module']} ({row['kept']})")
        for name in result.get("not_copied", []):
            console.print(f"not copied: the folder {name} of {model}")


def _matrices(console: Console, rows: list[dict[str, Any]], *, dry_run: bool) -> None:
    shape = ("matrix", "rows", "columns", "bits")
    if dry_run:
        console.table(shape, [(r["module"], *r["shape"], r["bits"]) for r in rows])
        return
    console.table(
        (*shape, "relative error", "clipped", "worst group"),
        [
            (
                r["module"],
                *r["shape"],
                r["bits"],
                r["relative_error"],
                r["clipped_fraction"],
                r["worst_relative_error"],
            )
            for r in rows
        ],
    )
