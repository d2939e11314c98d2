"""q38 tune-triton: launch geometry of the GPU kernels for the GPU at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session


@app.command("tune-triton")
def tune_triton(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Directory whose config.json gives the sizes; default: those of Qwen3.8-Flash-Next.",
            show_default=False,
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--out",
            help="Directory for <GPU>.json and report.json; default: where q38 serve looks for it.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Routing trace of q38 build-placement to tune on; default: synthetic uniform routing.",
            show_default=False,
        ),
    ] = None,
    kernels: Annotated[
        str, typer.Option(help="Kernels to tune, separated by commas.")
    ] = "decode,prefill,int8",
    layers: Annotated[
        int, typer.Option(help="MoE layers in one timed graph; their rows should exceed the L2 cache.")
    ] = 24,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Choose launch geometry for the decode, prefill and INT8 kernels on this GPU.

    Every candidate is checked against a reference before it is timed, gate-up and down are timed as a
    pair, and only wins above 2 % over the default are kept. A killed run resumes with the same command.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.kernels.configs import own_directory
        from q38.measure.kernels import plan_tuning, tune_model_kernels

        out = out or own_directory()
        chosen = tuple(part.strip() for part in kernels.split(",") if part.strip())
        if dry_run:
            plan = plan_tuning(model, trace=trace, kernels=chosen, layers=layers)
            console.table(
                ("kernel", "shape", "tokens"),
                [(k, ", ".join(f"{n} {v}" for n, v in shape.items()), t) for k, shape, t in plan.units],
                title=f"would tune {len(plan.units)} units and write {out}",
            )
            console.emit({"dry_run": True, "out": str(out), "units": [list(u) for u in plan.units]})
            return
        report = tune_model_kernels(
            model, out, trace=trace, kernels=chosen, layers=layers, fresh=fresh, progress=console.progress
        )
        console.table(
            ("kernel", "shape", "tokens", "default us", "tuned us"),
            [
                (r["kernel"], " x ".join(str(v) for v in r["shape"].values()), r["tokens"], r["default"]["us"],
                 r["best"] and r["best"]["us"])
                for r in report["results"]
            ],
            title=f"{report['device']}, {report['routing']} routing; '-' keeps the default",
        )  # fmt: skip
        console.print(f"wrote {out}")
        console.emit(report)
