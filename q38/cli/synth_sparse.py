"""`q38 synth sparse`: the full-size layout without the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from q38.cli.console import DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session
from q38.cli.synth import synth


@synth.command("sparse")
def sparse(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory for the checkpoint.")],
    layout: Annotated[Literal["bf16", "fp8", "quantized"], typer.Option(help="Layout to write.")] = "bf16",
    config: Annotated[
        Path | None,
        typer.Option(help="config.json whose shape to use; default: the real model's.", show_default=False),
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Recipe of the quantized layout.")
    ] = "quality-24gb",
    shard_gb: Annotated[float, typer.Option(min=0.001, help="Size of a shard in GB (10^9 bytes).")] = 2.75,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
) -> None:
    """Write a checkpoint of the real size as sparse files: true headers, holes for data.

    It takes some hundred megabytes of disk and serves to try inspect, plan and dry runs at scale.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.units import format_bytes
        from q38.synth.sparse import plan_sparse, synth_sparse

        if dry_run:
            result = plan_sparse(config, layout=layout, recipe=recipe)
        else:
            result = synth_sparse(
                out,
                config,
                layout=layout,
                recipe=recipe,
                shard_bytes=int(shard_gb * 1e9),
                fresh=fresh,
                progress=console.progress,
            )
        console.print(
            f"{out}: {result['tensors']:,} tensors, {format_bytes(result['tensor_bytes'])} of tensors"
        )
        console.emit({"out": str(out), "dry_run": dry_run, **result})
