"""q38 verify: is this checkpoint whole, are its numbers sound, and how close is it to its source?"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, FreshFlag, JsonFlag, session

KL, TOP1 = "kl divergence", "top-1 agreement"
SHOWN = 10  # faults per check; the JSON document has more


@app.command("verify")
def verify(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the checkpoint.")],
    source: Annotated[
        Path | None,
        typer.Option(help="Checkpoint that MODEL was made from (bf16 or FP8).", show_default=False),
    ] = None,
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the split n-gram table; default: MODEL/ple or beside MODEL.",
            show_default=False,
        ),
    ] = None,
    parts: Annotated[
        str, typer.Option(help="Parts to run, separated by commas.")
    ] = "structure,numbers,quality",
    text: Annotated[
        str,
        typer.Option(
            help="Text, of which the held-out part is used: 'multilingual', 'stdlib', a JSONL file or a hub file;"
            " see docs/quality.md."
        ),
    ] = "multilingual",
    tokens: Annotated[int, typer.Option(help="Tokens of text that quality is measured on.")] = 4096,
    seqlen: Annotated[int, typer.Option(help="Tokens per sequence; errors are clustered by sequence.")] = 256,
    max_kl: Annotated[
        float | None,
        typer.Option(help="Fail above this mean KL divergence from the source, in nats.", show_default=False),
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option(
            help="Fail below this share of positions where both choose the same token.", show_default=False
        ),
    ] = None,
    dtype: Annotated[
        str,
        typer.Option(help="Arithmetic of the quality part: bfloat16 (as served) or float32 (less noise)."),
    ] = "bfloat16",
    device: Annotated[str, typer.Option(help="Where the quality part computes: auto, cpu or cuda.")] = "auto",
    memory: Annotated[
        str | None,
        typer.Option(
            help="Host memory the quality part may take, for example 28GiB; default: what is available.",
            show_default=False,
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Directory for the quality report (Markdown, JSON, plots) and the state that a killed run resumes from.",
            show_default=False,
        ),
    ] = None,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Check structure and numbers of a checkpoint, and measure its quality against the source.

    Structure compares files, tensors, config and tokenizer. Numbers looks for values that are not
    finite, unused codes and weights far from the source's. Quality is NLL, full-vocabulary KL
    divergence and top-1 agreement on held-out text, with standard errors and the noise floor; it
    needs neither model whole in memory.
    Exits with 1 if any check fails.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.units import parse_bytes
        from q38.measure.verify import verify as run

        document = run(
            model,
            source=source,
            ple=ple,
            parts=[part.strip() for part in parts.split(",") if part.strip()],
            text=text,
            tokens=tokens,
            seqlen=seqlen,
            max_kl=max_kl,
            min_top1=min_top1,
            dtype=dtype,  # type: ignore[arg-type]  # checked there
            device=device,
            memory=parse_bytes(memory, where="--memory") if memory else None,
            report=report,
            fresh=fresh,
            progress=console.progress,
        )
        console.emit(document)
        for part in document["parts"]:
            _print_part(console, part)
        console.print("verify: passed" if document["passed"] else "verify: FAILED")
        if not document["passed"]:
            console.fail()


def _print_part(console: Console, part: dict[str, Any]) -> None:
    floor = part.get("floor", {})
    measured = any(check["value"] is not None for check in part["checks"])
    columns = ["check", "result", "over", "unit"]
    columns += ["value", "standard error", "noise floor", "limit"] if measured else ["note"]
    rows = []
    for check in part["checks"]:
        row = [check["name"], _verdict(check), check["checked"], check["unit"]]
        noise = floor.get(check["name"], {}).get("value")
        row += (
            [check["value"], check["standard_error"], noise, check["limit"]] if measured else [check["note"]]
        )
        rows.append(row)
    console.table(columns, rows, title=part["name"])
    for check in part["checks"]:
        for fault in check["faults"][:SHOWN]:
            tensor = f" {fault['tensor']}" if fault["tensor"] else ""
            console.print(f"  {check['name']}: {fault['file']}{tensor}: {fault['what']}")
        if check["fault_count"] > SHOWN:
            console.print(f"  {check['name']}: {check['fault_count'] - SHOWN} more")
    if groups := part.get("groups"):
        console.table(
            ["group", "bits", "matrices", "levels used", "relative error", "worst", "limit", "worst matrix"],
            [
                [g["name"], g["bits"], g["matrices"], g["levels_used"], g["relative_error"],
                 g["worst_relative_error"], g["limit"], g["worst_matrix"]]
                for g in groups
            ],
        )  # fmt: skip
    if layers := part.get("layers"):
        console.table(
            ["block", "relative error of the output", "standard error", "noise floor", "of the block alone"],
            [
                [row["layer"], row["relative_error"], row["standard_error"], row["floor"], row["own"]]
                for row in layers
            ],
        )
    for kind, rows in part.get("by", {}).items():
        console.table(
            [kind, "positions", "nll, source", "nll", KL, "standard error", "noise floor", TOP1],
            [
                [r["name"], r["positions"], r["nll, source"]["value"], r["nll"]["value"], r[KL]["value"],
                 r[KL]["standard_error"], r["floor"]["value"], r[TOP1]["value"]]
                for r in rows
            ],
        )  # fmt: skip
    console.print()


def _verdict(check: dict[str, Any]) -> str:
    if check["passed"] is None:
        return "-"
    return "passed" if check["passed"] else "FAILED"
