"""`q38 split-ple`: the n-gram table into its own file, and its check."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from q38.base.errors import InputError
from q38.base.units import format_bytes
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session


class StoredDtype(StrEnum):
    F8_E4M3 = "f8_e4m3"
    SOURCE = "source"


@app.command("split-ple")
def split_ple(
    source: Annotated[
        Path | None, typer.Argument(metavar="SRC", help="Checkpoint directory that holds the n-gram table.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Directory for ple.json and the table.")
    ] = None,
    dtype: Annotated[
        StoredDtype,
        typer.Option(
            help="Stored dtype: f8_e4m3 (a bf16 table is quantized with one scale), or as in the source."
        ),
    ] = StoredDtype.F8_E4M3,
    verify: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Check a split table instead of making one.")
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="SRC", help="With --verify: compare with this checkpoint's table.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="With --verify: sha256 and every row, not 64 rows of each shard.")
    ] = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Split the n-gram table (PLE) off a checkpoint into one flat file that is read by row, or check one.

    A killed run resumes with the same command.
    """
    with session(json_mode=json, debug=debug) as console:
        if verify is not None:
            if source is not None or out is not None:
                raise InputError(
                    "--verify takes no SRC and no --out", remedy="give the source with --against SRC"
                )
            _verify(console, verify, against, full=full)
        elif source is None or out is None:
            raise InputError("SRC and -o OUT are needed", remedy="run q38 split-ple SRC -o OUT")
        elif dry_run:
            _plan(console, source, out, dtype)
        else:
            _split(console, source, out, dtype, fresh=fresh)


def _verify(console: Console, directory: Path, against: Path | None, *, full: bool) -> None:
    from q38.ple.verify import verify_ple

    result = verify_ple(directory, against=against, full=full, progress=console.progress)
    console.emit(result)
    hashed = "sha256 right" if result["sha256_checked"] else "size right"
    console.print(f"{directory}: {hashed}, {result['rows_compared']:,} rows compared, all equal")


def _plan(console: Console, source: Path, out: Path, dtype: StoredDtype) -> None:
    from q38.ple.split import plan_split

    plan = plan_split(source, dtype=dtype.value)
    console.emit(plan)
    console.print(
        f"would read {format_bytes(plan['reads'])} ({plan['shards']} shards, {plan['source_dtype']}) and write "
        f"{format_bytes(plan['writes'])} to {out / plan['file']}"
    )


def _split(console: Console, source: Path, out: Path, dtype: StoredDtype, *, fresh: bool) -> None:
    from q38.ple.split import split_ple

    info = split_ple(source, out, dtype=dtype.value, fresh=fresh, progress=console.progress)
    console.emit(info)
    console.print(
        f"{out / info['file']}: {info['rows']:,} rows of {info['dim']} {info['dtype']} values, "
        f"{format_bytes(info['bytes'])}, weight_scale {info['weight_scale']}"
    )
    if quantization := info["quantization"]:
        console.print(
            f"quantized from bf16: relative error {quantization['relative_error']:.2%}, "
            f"{quantization['saturated']:,} values saturated, "
            f"{quantization['flushed_to_zero_fraction']:.2%} became zero"
        )
