"""`q38 synth full`: a packed checkpoint of random weights that a server can load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.cli.console import DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session
from q38.cli.synth import synth


@synth.command("full")
def full(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory for the checkpoint.")],
    gpu_scale: Annotated[
        bool, typer.Option("--gpu-scale", help="The real model's shape, 39 GB; without it the tiny model's.")
    ] = False,
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Which matrices have how many bits.")
    ] = "quality-24gb",
    seed: Annotated[int, typer.Option(min=0, help="Decides which experts are popular.")] = 0,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
) -> None:
    """Write a packed checkpoint of random weights, ready to serve: for measuring a server without the real weights.

    It has every tensor of a finished checkpoint, a tokenizer and a chat template, an n-gram table of zeros that
    takes no disk, routers with the published skew, and the routing profile that belongs to them.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.units import format_bytes
        from q38.synth.full import plan_full, synth_full

        if dry_run:
            result = plan_full(gpu_scale=gpu_scale, recipe=recipe)
        else:
            result = synth_full(
                out, gpu_scale=gpu_scale, recipe=recipe, seed=seed, fresh=fresh, progress=console.progress
            )
        verb = "would hold" if dry_run else "holds"
        console.print(f"{out} {verb} {result['tensors']:,} tensors, {format_bytes(result['tensor_bytes'])}")
        console.emit({"out": str(out), "dry_run": dry_run, **result})
