"""q38 release: a directory that anyone can check, rebuild and trust."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.base.units import format_bytes, format_seconds
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session

release = typer.Typer(
    no_args_is_help=True, help="Seal a finished model, check a sealed one, compare two, print the model card."
)
app.add_typer(release, name="release")

SHOWN = 20  # rows of a table; the JSON document has more

SealedDir = Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a release.")]


@release.command("build")
def build(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL", help="Directory of a q38 run, or of a finished model. It is not changed."
        ),
    ],
    out: Annotated[
        Path,
        typer.Option("-o", "--out", help="Directory of the release; the same command goes on after a kill."),
    ],
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the split n-gram table; default: MODEL/ple or beside MODEL.",
            show_default=False,
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option(
            help="Source checkpoint, for its licence; default: the one that the run read.", show_default=False
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="Recipe file of a model made without q38 run.", show_default=False)
    ] = None,
    quality: Annotated[
        Path | None,
        typer.Option(
            help="Document of q38 verify --json, of a model made without q38 run.", show_default=False
        ),
    ] = None,
    speed: Annotated[
        Path | None, typer.Option(help="Document of q38 bench serve -o, as --quality.", show_default=False)
    ] = None,
    behaviour: Annotated[
        Path | None, typer.Option(help="Document of q38 verify --server --json.", show_default=False)
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="Title of the card; default: the name of the recipe, or of the directory.",
            show_default=False,
        ),
    ] = None,
    base_model: Annotated[
        str | None,
        typer.Option(
            help="Hub name of the model that this one was quantized from, for the card.", show_default=False
        ),
    ] = None,
    license: Annotated[
        str | None,
        typer.Option(help="Licence identifier for the card, instead of the source's.", show_default=False),
    ] = None,
    card: Annotated[
        Path | None,
        typer.Option(
            help="A model card of your own, instead of the one made from the reports.", show_default=False
        ),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option("--copy", help="Copy every file; without it, hard links where the disk allows them."),
    ] = False,
    read_only: Annotated[
        bool,
        typer.Option("--read-only", help="Take away all write permissions at the end; copies every file."),
    ] = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Make a sealed directory of a finished run or model.

    It is laid out for the Hugging Face hub, and nothing is uploaded. RELEASE.json lists every file with its size and sha256, the recipe, the calibration, package versions, the machine,
    the commands and the reports. Its seal stands for all of it: keep it where the files are not.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.release.build import build as run

        result = run(
            _contents(
                model,
                ple=ple,
                source=source,
                recipe=recipe,
                quality=quality,
                speed=speed,
                behaviour=behaviour,
            ),
            out,
            name=name,
            base_model=base_model,
            license=license,
            card=card,
            copy=copy,
            read_only=read_only,
            dry_run=dry_run,
            fresh=fresh,
            progress=console.progress,
        )
        if dry_run:
            console.print(
                f"would put {len(result['files'])} files, {format_bytes(result['bytes'])}, into {out}, "
                f"{format_bytes(result['writes'])} of it written and the rest linked"
            )
        else:
            for warning in result["warnings"]:
                console.print(f"note: {warning}")
            console.print(
                f"{out}: {result['files']} files, {format_bytes(result['bytes'])}, {result['linked']} of them links"
                + (", read-only" if read_only else "")
            )
            console.print(f"seal: {result['seal']}")
        console.emit(result)


def _contents(model: Path, *, source: Path | None, **parts: Path | None) -> Any:
    from q38.base.errors import InputError
    from q38.pipeline.releasing import from_run, is_run
    from q38.release.collect import from_model

    if not is_run(model):
        return from_model(model, source=source, **parts)
    given = next((name for name, value in parts.items() if value is not None), None)
    if given is not None and given != "behaviour":
        raise InputError(
            "the directory of a run has its own",
            where=f"--{given}",
            remedy="leave it out, or give WORKDIR/model",
        )
    return from_run(model, source=source, behaviour=parts["behaviour"])


@release.command("check")
def check(
    directory: SealedDir,
    full: Annotated[
        bool, typer.Option("--full", help="Hash every byte, not one piece of each large file.")
    ] = False,
    digest: Annotated[
        str | None,
        typer.Option(help="The seal that the release was announced with.", show_default=False),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say which files are not as they were sealed.

    Changed, missing and extra ones are named. Without --full: sizes, names, headers, every file up to 64 MiB and a random piece of each larger one.
    Exits with 1 if any file differs.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.release.check import check as run

        result = run(directory, full=full, digest=digest, progress=console.progress)
        console.emit(result)
        _print_check(console, result)
        if not result["passed"]:
            console.fail()


def _print_check(console: Console, result: dict[str, Any]) -> None:
    if faults := result["faults"]:
        console.table(("file", "is", "what"), [(f["file"], f["kind"], f["what"]) for f in faults[:SHOWN]])
        if len(faults) > SHOWN:
            console.print(f"and {len(faults) - SHOWN} more")
    if result["seal"]:
        console.print(
            f"{result['files']} files, {format_bytes(result['bytes'])}; {format_bytes(result['bytes_read'])} hashed in "
            f"{format_seconds(result['seconds'])}"
            + ("; --full hashes all of it" if result["bytes_read"] < result["bytes"] else "")
        )
        console.print(f"seal: {result['seal']}")
    console.print("release check: passed" if result["passed"] else "release check: FAILED")


@release.command("diff")
def diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A release, or a model directory.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another one.")],
    strict: Annotated[
        bool, typer.Option("--strict", help="Count what may vary between two builds of one recipe as well.")
    ] = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Say which files and tensors differ, and by how much.

    Every byte is compared. Times, dates and measurements may vary between two builds of one recipe: docs/release.md
    lists these fields. Packed matrices are compared as the weights they stand for.
    Exits with 1 if anything else differs; with --strict if any byte does.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.release.diff import diff as run

        result = run(a, b, progress=console.progress)
        console.emit(result)
        _print_diff(console, result)
        if not result["identical" if strict else "same"]:
            console.fail()


def _print_diff(console: Console, result: dict[str, Any]) -> None:
    if result["files"]:
        console.table(
            ("file", "is", "may vary", "bytes in A", "bytes in B", "first difference"),
            [
                (
                    f["file"],
                    f["state"],
                    "yes" if f["declared"] else "NO",
                    f["a"],
                    f["b"],
                    (f["keys"] or [""])[0],
                )
                for f in sorted(result["files"], key=lambda f: f["declared"])[:SHOWN]
            ],
        )
        if len(result["files"]) > SHOWN:
            console.print(f"and {len(result['files']) - SHOWN} more")
    if result["tensors"]:
        console.print()
        console.table(
            ("group", "tensors that differ", "largest |d|", "largest relative error"),
            [(g["group"], g["tensors"], g["max_abs"], g["relative_error"]) for g in result["groups"]],
        )
        console.print()
        console.table(
            ("tensor", "is", "A", "B", "changed", "of", "", "max |d|", "relative error"),
            [
                (
                    t["tensor"],
                    t["state"],
                    t["a"],
                    t["b"],
                    t["changed"],
                    t["of"],
                    t["unit"],
                    t["max_abs"],
                    t["relative_error"],
                )
                for t in result["tensors"][:SHOWN]
            ],
        )
        if result["tensor_count"] > SHOWN:
            console.print(f"and {result['tensor_count'] - SHOWN} more")
    if result["identical"]:
        console.print("identical")
    else:
        console.print("the same but for what may vary" if result["same"] else "different")


@release.command("card")
def card(
    directory: SealedDir,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Write it to this file instead of printing it.", show_default=False),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Print the model card that the reports give.

    It has the front matter of the Hugging Face hub. Every number in it is in a report of the release, and stands beside the command that measured it.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.checkpoint.writer import atomic_file
        from q38.release.card import card as make
        from q38.release.card import parse_card, refuse_other

        if out is not None:
            refuse_other(out)
        text = make(directory)
        if out is not None:
            with atomic_file(out) as f:
                f.write(text.encode())
        console.print(text.rstrip("\n") if out is None else f"wrote {out}")
        console.emit({"release": str(directory), "metadata": parse_card(text, where=directory), "card": text})
