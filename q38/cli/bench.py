"""q38 bench: speed. `bench` is the group; q38.cli.bench_kernels adds `q38 bench kernels` to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session

GateOption = Annotated[
    float, typer.Option("--gate", help="New speed / old speed; slower is what lies surely below it.")
]
AllowDifferentFlag = Annotated[
    bool, typer.Option("--allow-different", help="Compare other models, settings or machines all the same.")
]

bench = typer.Typer(no_args_is_help=True, help="Measure speed: of a running server, or of the kernels.")
app.add_typer(bench, name="bench")


@bench.command("serve")
def serve(
    url: Annotated[
        str, typer.Option(help="Root address of an OpenAI-compatible server.")
    ] = "http://127.0.0.1:30000",
    depths: Annotated[
        str,
        typer.Option(
            "--depths",
            "--contexts",
            help="Prompt lengths in tokens, like 128,2k,10k (k is 1,024); the chat template counts.",
        ),
    ] = "128,2k",
    concurrency: Annotated[str, typer.Option(help="Numbers of requests sent at once, like 1,2,4.")] = "1",
    prefix: Annotated[
        str,
        typer.Option(
            help="cold: prompts that the server has never seen; warm: the same ones with another question, at the lowest "
            "concurrency."
        ),
    ] = "cold,warm",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 64,
    repeats: Annotated[
        int | None,
        typer.Option(
            help="Measured rounds per cell, after the warm-up.", show_default="3; 10 with --against"
        ),
    ] = None,
    max_warmup: Annotated[
        int, typer.Option(help="Rounds to drop at most, until two in a row agree within 10 %.")
    ] = 4,
    model: Annotated[
        str | None,
        typer.Option(help="Model name; default: the first that the server lists.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="Q38_API_KEY", help="The server's API key.", show_default=False)
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            help="UTF-8 file to make prompts of, passages apart by blank lines; default: the shipped text.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of the text's passages.")] = 0,
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence after which a request has failed.")
    ] = 600.0,
    against: Annotated[
        str | None,
        typer.Option(
            help="Compare with a stored result, or with the server at this address, which then takes turns with the "
            "first; exit 1 when slower.",
            show_default=False,
        ),
    ] = None,
    gate: GateOption = 0.98,
    allow_different: AllowDifferentFlag = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o", "--out", help="Write the JSON result to this file, after every cell.", show_default=False
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(
            help="Write report.html, report.md and the plots into this directory.", show_default=False
        ),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
) -> None:
    """Measure time to first and last token, prefill and decode tokens/s of a running server.

    Prompts are varied text in many languages and code, filled to the depth, with a nonce in front so that no prefix
    cache helps; prompt lengths are the server's own counts. Warm-up rounds are dropped until the speed is steady; the
    figures are medians over the rounds after it. One failed request ends the benchmark; finished cells are kept.

    With --against, every speed is compared as a ratio with a confidence interval. The exit code is 1 when an
    interval lies below the gate.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.checkpoint.writer import write_json
        from q38.measure.bench.compare import read_result, refuse_finished
        from q38.measure.bench.plan import Plan, check_gate, parse_numbers, parse_prefixes
        from q38.measure.bench.report import write_bench_report
        from q38.measure.bench.run import BenchFailed, bench_serve
        from q38.measure.files import require_writable

        plan = Plan(
            parse_numbers(depths, where="--depths"),
            parse_numbers(concurrency, where="--concurrency"),
            parse_prefixes(prefix),
            max_tokens=max_tokens,
            repeats=(3 if against is None else 10) if repeats is None else repeats,
            max_warmup=max_warmup,
            seed=seed,
        )
        check_gate(gate)
        if against is not None:
            plan.require_spread()
        live = against is not None and against.startswith(("http://", "https://"))
        base = against if live or against is None else read_result(Path(against))
        if out is not None:
            refuse_finished(out, fresh=fresh)
        if dry_run:
            rounds = plan.most_rounds * (2 if live else 1)
            console.print(f"would play at most {rounds} rounds of requests to {url}")
            for target in (out, report):
                if target is not None:
                    console.print(f"would write {target}")
            console.emit(
                {
                    "dry_run": True,
                    "url": url,
                    "most_rounds": rounds,
                    "out": out and str(out),
                    "report": report and str(report),
                }
            )
            return
        for target in (out, report and report / "report.html"):
            if target is not None:
                require_writable(target)
        keep = out

        def save(result: dict[str, Any]) -> None:
            if keep is not None:
                write_json(keep, result)

        try:
            result = bench_serve(
                url,
                plan,
                model=model,
                api_key=api_key,
                stall_s=stall_timeout,
                text=text,
                against=base,
                gate=gate,
                allow_different=allow_different,
                save=save,
                progress=console.progress,
            )
        except BenchFailed as error:
            if error.partial["cells"]:
                _show(console, error.partial, out)
                if report is not None:
                    write_bench_report(report, error.partial)
            raise
        if report is not None:
            write_bench_report(report, result)
            console.print(f"wrote {report / 'report.html'}")
        _show(console, result, out)
        console.emit(result)


@bench.command("compare")
def compare(
    new: Annotated[Path, typer.Argument(help="Result of q38 bench serve -o.")],
    old: Annotated[Path, typer.Argument(help="The earlier one.")],
    gate: GateOption = 0.98,
    allow_different: AllowDifferentFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Compare two stored results: ratios of speeds with confidence intervals, exit 1 when the new one is slower."""
    with session(json_mode=json, debug=debug) as console:
        from q38.measure.bench.compare import compare_results, read_result
        from q38.measure.bench.plan import check_gate

        check_gate(gate)
        comparison = compare_results(
            read_result(new), read_result(old), gate=gate, allow_different=allow_different, where=str(old)
        )
        _show_comparison(console, comparison)
        console.emit(comparison)


def _show_comparison(console: Console, comparison: dict[str, Any]) -> None:
    """The rows and the verdict; slower ends the verb with 1."""
    from q38.measure.bench.compare import SLOWER
    from q38.measure.bench.tables import comparison_table, verdict_line

    table = comparison_table(comparison)
    console.table(table.columns, table.rows)
    for difference in comparison["differences"]:
        console.print(f"Compared although different: {difference}.")
    if comparison["verdict"] == SLOWER:
        console.progress.say(f"q38: {verdict_line(comparison)}")
        console.fail()
    else:
        console.print(f"{verdict_line(comparison)}.")


def _show(console: Console, result: dict[str, Any], out: Path | None) -> None:
    """The result for people."""
    from q38.measure.bench.tables import cell_table, notes, ran_on

    console.print(ran_on(result))
    table = cell_table(result)
    settings = result["settings"]
    console.table(
        table.columns,
        table.rows,
        title=f"medians of {settings['repeats']} rounds, {settings['max_tokens']} tokens an answer",
    )
    for note in notes(result):
        console.print(note)
    if result.get("comparison"):
        console.print()
        _show_comparison(console, result["comparison"])
    if out is not None:
        console.print(f"wrote {out}")


# Last, because it adds its command to the group above.
from q38.cli import bench_kernels  # noqa: E402, F401
