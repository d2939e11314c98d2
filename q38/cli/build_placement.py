"""q38 build-placement: which experts each layer selects, on sample text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.base.units import format_bytes
from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session


@app.command("build-placement")
def build_placement(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the checkpoint.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Profile to write (safetensors).")],
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the split n-gram table; default: MODEL/ple or beside MODEL.",
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        str, typer.Option(help="Sample text: a JSONL file with one {'text': ...} per line, or 'stdlib'.")
    ] = "stdlib",
    tokens: Annotated[int, typer.Option(help="Tokens to trace; below 512 the profile is refused.")] = 4096,
    seqlen: Annotated[int, typer.Option(help="Tokens per sequence.")] = 128,
    resident: Annotated[
        str | None,
        typer.Option(
            help="Experts per layer in device memory to report coverage for, separated by commas; default: a range.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Also write every selection to this trace file (safetensors).", show_default=False),
    ] = None,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Count which experts each layer selects and their gate mass, and report what S resident experts cover.

    Runs on the CPU through transformers. Coverage is measured on held-out text: one half of the
    sequences chooses the experts, the other half tests them. A profile of another model or text is
    replaced only with --fresh.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.errors import InputError
        from q38.measure.placement import build_placement as run
        from q38.measure.placement import plan_placement

        try:
            sizes = [int(part) for part in resident.split(",")] if resident else None
        except ValueError:
            raise InputError(
                f"'{resident}' is not a list of numbers", where="--resident", remedy="write 128,184"
            ) from None
        if dry_run:
            plan = plan_placement(model, out, text=text, tokens=tokens, seqlen=seqlen, fresh=fresh)
            console.emit(plan)
            state = (
                "is up to date" if plan["up_to_date"] else f"would be written: {format_bytes(plan['bytes'])}"
            )
            console.print(f"{out} {state}, {plan['tokens']:,} tokens traced")
            return
        result = run(
            model,
            out,
            ple=ple,
            text=text,
            tokens=tokens,
            seqlen=seqlen,
            sizes=sizes,
            trace=trace,
            fresh=fresh,
            progress=console.progress,
        )
        console.emit(result)
        console.table(
            ["S", "even routing", "same half", "held out, equal S", "held out, by layer", "gate mass", "smallest", "largest"],
            [
                [row["resident"], row["even"], row["built"]["selections"], row["equal"]["selections"],
                 row["budgets"]["selections"], row["equal"]["mass"], row["smallest"], row["largest"]]
                for row in result["coverage"]
            ],
            title=f"share of selections covered by S experts per layer of {result['experts']}; gate mass held out, "
            "equal S; slots of a layer when they follow the marginal gain",
        )  # fmt: skip
        console.print(
            f"{out}: {result['tokens']:,} tokens, {result['layers']} layers of {result['experts']} experts, "
            f"{result['unseen']:,} never selected"
        )
