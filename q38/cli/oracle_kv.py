"""q38 oracle kv: what a format of the KV cache costs in quality."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from q38.base.errors import InputError
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session
from q38.cli.oracle import PleOption, oracle

Number = TypeVar("Number", int, float)


@oracle.command("kv")
def kv(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the packed checkpoint.")],
    out: Annotated[
        Path, typer.Option("-o", "--out", help="Result to write (JSON); the plot goes beside it.")
    ],
    ple: PleOption = None,
    formats: Annotated[
        str, typer.Option(help="Formats to compare with bf16: int8, int8ring_int4, int4, fp8.")
    ] = "int8,int8ring_int4,int4",
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text.")] = 8192,
    chunk: Annotated[
        int, typer.Option(min=1, help="Prompt tokens of one prefill step; positions before it do not count.")
    ] = 512,
    ring: Annotated[
        int | None,
        typer.Option(
            min=1, help="Newest tokens that int8ring_int4 keeps in INT8; default: 8192.", show_default=False
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(help="Text file; default: the passages that ship with q38.", show_default=False),
    ] = None,
    needles: Annotated[
        str | None,
        typer.Option(
            help="Lengths of texts with a hidden fact, in tokens, or none; default: a quarter, half and all of --tokens.",
            show_default=False,
        ),
    ] = None,
    depths: Annotated[str, typer.Option(help="Depths of the fact in them, 0 to 1.")] = "0.1,0.5,0.9",
    device: Annotated[
        str | None,
        typer.Option(help="cuda, or cpu for tests and tiny models; default: cuda.", show_default=False),
    ] = None,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Score a long text with each KV cache format and compare with a bf16 cache.

    Starts one server after the other. Two more runs say what a difference means: bf16 again (noise) and a
    cache of zeros (control). Exits with 1 where the control changes nothing: that text would show no fault.

    Each also answers for a fact hidden in texts of several lengths at several depths. Where the model does not
    look it up with a bf16 cache either, the table says so.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.measure import oracle_kv

        names = tuple(name.strip() for name in formats.split(",") if name.strip())
        options = oracle_kv.KvOptions(
            names, tokens, chunk, ring or oracle_kv.KvOptions.ring, text, device,
            None if needles is None else _numbers(needles, int, "--needles"), _numbers(depths, float, "--depths"),
        )  # fmt: skip
        if dry_run:
            planned = oracle_kv.plan(model, out, options=options, fresh=fresh)
            console.emit(planned)
            if planned["up_to_date"]:
                console.print(f"{out} is up to date")
            else:
                console.print(
                    f"would start {planned['servers']} servers, score {planned['positions']:,} positions and {planned['needles']} needles with each and write {out}"
                )
            return
        result = oracle_kv.measure(
            model, out, ple=ple, options=options, fresh=fresh, progress=console.progress
        )
        console.emit(result)
        rows = {
            **result["formats"],
            "bf16 again (noise)": result["noise"],
            "zeros (control)": result["control"],
        }
        console.table(
            ["KV cache", "bytes/token", "NLL", "d NLL", "mean |d| nats", "max |d| nats"],
            [
                [
                    name,
                    f"{row['bytes_per_token']:,.0f}" if "bytes_per_token" in row else "",
                    f"{row['nll']:.4f}",
                    f"{row['d_nll']:+.4f}",
                    f"{row['mean_abs']:.4f}",
                    f"{row['max_abs']:.3f}",
                ]
                for name, row in rows.items()
            ],
        )
        if result["needles"]:
            _needles(console, result["needles"])
        console.print(f"wrote {out} and its plots beside it")


def _needles(console: Console, part: dict[str, Any]) -> None:
    """What became of the hidden facts."""
    console.print(
        f"{part['needles']} hidden facts, each worth {part['worth']:.2f} nats with bf16"
        + (
            ""
            if part["retrieves"]
            else ": this model does not look them up, so the table shows how far its scores move"
        )
    )
    console.table(
        ["KV cache", "found", "d NLL", "mean |d| nats"],
        [
            [name, f"{row['found']} of {part['needles']}", f"{row['d_nll']:+.4f}", f"{row['mean_abs']:.4f}"]
            for name, row in part["runs"].items()
        ],
    )


def _numbers(text: str, kind: Callable[[str], Number], where: str) -> tuple[Number, ...]:
    """Numbers with commas between them; "none" for none of them.

    Raises:
        InputError: something else.
    """
    if text.strip() == "none":
        return ()
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"'{text}' is no list of numbers", where=where, remedy="write it like 512,2048"
        ) from None
