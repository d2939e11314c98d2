"""q38 oracle: log-probabilities of fixed continuations, saved once and compared after every change."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session

oracle = typer.Typer(
    no_args_is_help=True, help="Score fixed continuations, and compare the scores after a change."
)
app.add_typer(oracle, name="oracle")

PleOption = Annotated[
    Path | None,
    typer.Option(
        help="Directory of the split n-gram table; default: MODEL/ple or beside MODEL.", show_default=False
    ),
]
PromptsOption = Annotated[
    Path | None, typer.Option(help="Prompt file; default: the set that ships with q38.", show_default=False)
]


class Kind(StrEnum):
    HOST = "host"
    KERNEL = "kernel"


class EngineDtype(StrEnum):
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


@oracle.command("save")
def save(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the checkpoint.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="Reference file to write (JSON).")],
    ple: PleOption = None,
    prompts: PromptsOption = None,
    dtype: Annotated[
        EngineDtype, typer.Option(help="Arithmetic of the in-process engine.")
    ] = EngineDtype.FLOAT32,
    repeats: Annotated[int, typer.Option(help="Times to score; the spread is stored as the noise.")] = 2,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Score the prompt set and write a reference file.

    The file carries hashes of the model, the tokenizer and the prompts, the noise, and the proof that
    a wrong input and a wrong weight are noticed. A reference that is there already is kept if it is
    of this model, and is replaced only with --fresh.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.measure.oracle import plan_save
        from q38.measure.oracle import save as run

        if dry_run:
            plan = plan_save(model, out, prompts=prompts, dtype=dtype.value, repeats=repeats, fresh=fresh)
            console.emit(plan)
            if plan["up_to_date"]:
                console.print(f"{out} is up to date")
                return
            console.print(
                f"would score {plan['tokens']:,} tokens of {plan['prompts']} prompts {repeats} times and write {out}"
            )
            return
        document = run(
            model,
            out,
            ple=ple,
            prompts=prompts,
            dtype=dtype.value,
            repeats=repeats,
            fresh=fresh,
            progress=console.progress,
        )
        console.emit(document)
        noise = document["noise"]
        console.table(
            ["fault put in", "mean |d| nats", "max |d| nats", "noticed"],
            [[row["what"], row["mean"], row["max"], row["noticed"]] for row in document["self_check"]],
        )
        console.print(
            f"noise over {noise['repeats']} runs: mean {noise['mean']:.3g}, max {noise['max']:.3g} nats"
        )
        console.print(f"wrote {out}")


@oracle.command("check")
def check(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Directory of the checkpoint.")],
    reference: Annotated[Path, typer.Argument(metavar="REF.json", help="File that q38 oracle save wrote.")],
    ple: PleOption = None,
    prompts: PromptsOption = None,
    kind: Annotated[
        Kind,
        typer.Option(
            "--class",
            help="Kind of change under test: host (no arithmetic changed: mean 0.01, max 0.5 nats) or kernel (mean 0.05).",
        ),
    ] = Kind.HOST,
    max_mean: Annotated[
        float | None,
        typer.Option(help="Another limit for the mean |difference|, in nats.", show_default=False),
    ] = None,
    max_abs: Annotated[
        float | None,
        typer.Option(help="Another limit for the largest |difference|, in nats.", show_default=False),
    ] = None,
    dtype: Annotated[
        EngineDtype | None,
        typer.Option(help="Arithmetic of the in-process engine; default: the reference's."),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Score again and compare with a reference file.

    Exits with 1 when a limit is exceeded, and names the worst prompt and token. Refuses (exit 2) a
    reference of another source model, tokenizer or prompt set; engine, kernels and weights may differ.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.measure.oracle import check as run

        result = run(
            model,
            reference,
            ple=ple,
            prompts=prompts,
            kind=kind.value,
            max_mean=max_mean,
            max_abs=max_abs,
            dtype=dtype.value if dtype else None,
            progress=console.progress,
        )
        console.emit(result)
        console.table(
            ["prompt", "kind", "language", "tokens", "mean |d| nats", "max |d| nats"],
            [
                [p["id"], p["kind"], p["language"], p["tokens"], p["mean"], p["max"]]
                for p in result["prompts"]
            ],
        )
        limits, worst = result["limits"], result["worst"]
        console.table(
            ["", "value", "limit", "noise"],
            [[name, result[name], limits[name], result["noise"][name]] for name in ("mean", "max")],
        )
        console.print(
            f"worst: prompt {worst['prompt']}, token {worst['position']} {worst['token']!r}: "
            f"{worst['reference']:.4f} in the reference, now {worst['now']}"
        )
        if not result["weights_match"]:
            console.print("the weights are not those of the reference")
        for key, (before, after) in result["engine_changes"].items():
            console.print(f"engine {key}: {before} in the reference, now {after}")
        console.print("oracle: passed" if result["passed"] else "oracle: FAILED")
        if not result["passed"]:
            console.fail()
