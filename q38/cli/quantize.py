"""`q38 quantize`: a source checkpoint to packed matrices, by a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.base.units import format_bytes, format_seconds
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session


@app.command("quantize")
def quantize(
    source: Annotated[
        Path,
        typer.Argument(metavar="SRC", help="Checkpoint directory, bf16 or FP8 release. It is not changed."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="Directory for the quantized checkpoint.")],
    recipe: Annotated[str, typer.Option("--recipe", "-r", help="Recipe file, or the name of a shipped one.")],
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the split n-gram table. Default: the table in SRC, else SRC/ple, else ple beside SRC."
        ),
    ] = None,
    blocks: Annotated[
        str | None,
        typer.Option(
            help="Stop after these blocks, for example 0-3. The same command without it goes on there."
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. Default: all cores this process may use.")
    ] = None,
    device: Annotated[
        str,
        typer.Option(help="Where to tune: auto (all CUDA GPUs, else the CPU), cpu, or GPU numbers like 0,1."),
    ] = "auto",
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Quantize a checkpoint by a recipe, one block at a time.

    A killed run resumes after the last finished block with the same command.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.quantize.driver import quantize
        from q38.recipe.schema import load_recipe

        result = quantize(
            source,
            out,
            load_recipe(recipe),
            ple=ple,
            blocks=blocks,
            threads=threads,
            device=device,
            dry_run=dry_run,
            fresh=fresh,
            progress=console.progress,
        )
        console.emit(result)
        _bits(console, result)
        if dry_run:
            _plan(console, result, out)
        else:
            _outcome(console, result, out)


def _bits(console: Console, result: dict[str, Any]) -> None:
    rows = [
        (group, ", ".join(f"{count} x {width} bit" for width, count in widths.items()))
        for group, widths in result["bits"].items()
    ]
    console.table(("group", "matrices"), rows)


def _plan(console: Console, result: dict[str, Any], out: Path) -> None:
    console.print(
        f"would read {format_bytes(result['reads'])} and write {result['tensors']:,} tensors,"
        f" {format_bytes(result['bytes'])}, to {out};"
        f" method {result['method']}, {result['blocks']} blocks"
    )
    if result["method"] != "rtn":
        need = result["calibration"]
        console.print(
            f"calibration: {need['tokens']:,} tokens, {format_bytes(need['cache_bytes'])} a cache of block inputs,"
            f" {format_bytes(need['host_bytes'])} of host memory and {format_bytes(need['scratch_bytes'])} of disk"
            " for resuming, at most"
        )


def _outcome(console: Console, result: dict[str, Any], out: Path) -> None:
    done = len(result["blocks"])
    if not result["complete"]:
        console.print(f"{done} blocks done; the same command without --blocks goes on after them")
        return
    console.print(
        f"{out}: {result['tensors']:,} tensors, {format_bytes(result['bytes'])},"
        f" {done} blocks in {format_seconds(result['seconds'])}"
    )
