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
    recorded: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Make the profile of recorded routing instead of running the model; may be given several times: a trace or "
            "profile of this command, a folder or file of dumped (ids, weights), or an old .pt with count and mass.",
            show_default=False,
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(
            help="Shares of the --from files, separated by commas; default: by their tokens.",
            show_default=False,
        ),
    ] = None,
    smoothing: Annotated[
        bool,
        typer.Option(
            help="Draw the counts of each of several --from files toward those of the others, as far as they agree."
        ),
    ] = True,
    server: Annotated[
        str | None,
        typer.Option(
            help="Record what a running server chooses while it answers --text: one of q38 serve --engine sglang, or SGLang "
            "with --enable-return-routed-experts.",
            show_default=False,
        ),
    ] = None,
    counted: Annotated[
        bool,
        typer.Option(
            "--counted",
            help="With --server: take what a server of q38 serve has counted since its start, and send it no prompts.",
        ),
    ] = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Count which experts each layer selects and their gate mass, and report what S resident experts cover.

    Runs on the CPU through transformers, unless --from or --server says where the routing comes from. Coverage is measured on held-out text: one half of the
    sequences chooses the experts, the other half tests them. A profile of another model or text is
    replaced only with --fresh.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.errors import InputError
        from q38.measure.placement import build_placement as run
        from q38.measure.placement import plan_placement
        from q38.measure.placement_sources import count_server, import_placement, record_server

        try:
            sizes = [int(part) for part in resident.split(",")] if resident else None
        except ValueError:
            raise InputError(
                f"'{resident}' is not a list of numbers", where="--resident", remedy="write 128,184"
            ) from None
        if (
            (recorded and server)
            or (weights and not recorded)
            or (trace and (recorded or counted))
            or (counted and not server)
        ):
            raise InputError(
                "these options exclude each other",
                where="--from, --weights, --server, --counted, --trace",
                remedy="give --from with or without --weights, or --server with or without --counted, or neither; "
                "--trace not with --from or --counted",
            )
        try:
            shares = [float(part) for part in weights.split(",")] if weights else None
        except ValueError:
            raise InputError(
                f"'{weights}' is not a list of numbers", where="--weights", remedy="write 2,1"
            ) from None
        if recorded:
            result = import_placement(
                model,
                out,
                recorded,
                weights=shares,
                smoothing=smoothing,
                sizes=sizes,
                fresh=fresh,
                dry_run=dry_run,
            )
        elif server and counted:
            result = count_server(model, out, server, sizes=sizes, fresh=fresh, dry_run=dry_run)
        elif server:
            result = record_server(
                model, out, server, text=text, tokens=tokens, seqlen=seqlen, sizes=sizes, trace=trace, fresh=fresh,
                dry_run=dry_run, progress=console.progress,
            )  # fmt: skip
        elif dry_run:
            result = plan_placement(
                model, out, text=text, tokens=tokens, seqlen=seqlen, trace=trace, fresh=fresh
            )
        else:
            result = run(
                model, out, ple=ple, text=text, tokens=tokens, seqlen=seqlen, sizes=sizes, trace=trace, fresh=fresh,
                progress=console.progress,
            )  # fmt: skip
        console.emit(result)
        if dry_run:
            size = format_bytes(result["bytes"])
            state = "is up to date" if result["up_to_date"] else f"would be written: {size}"
            console.print(f"{out} {state}, {result['tokens']:,} tokens traced")
            return
        console.table(
            ["S", "even routing", "same half", "held out, equal S", "held out, by layer", "gate mass", "smallest", "largest",
             "host/token"],
            [
                [row["resident"], row["even"], row["built"]["selections"], row["equal"] and row["equal"]["selections"],
                 row["budgets"] and row["budgets"]["selections"], (row["equal"] or row["built"])["mass"], row["smallest"],
                 row["largest"], format_bytes(row["host_bytes"])]
                for row in result["coverage"]
            ],
            title=f"share of selections covered by S experts per layer of {result['experts']}; gate mass held out, "
            "equal S; slots of a layer when they follow the marginal gain; bytes of expert rows read from the host",
        )  # fmt: skip
        console.print(
            f"{out}: {result['tokens']:,} tokens, {result['layers']} layers of {result['experts']} experts, "
            f"{result['unseen']:,} never selected"
        )
