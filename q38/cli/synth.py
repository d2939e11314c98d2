"""q38 synth: synthetic checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, FreshFlag, JsonFlag, session

synth = typer.Typer(
    no_args_is_help=True, help="Write synthetic Qwen4-Exp checkpoints for trying q38 without the weights."
)
app.add_typer(synth, name="synth")


@synth.command("tiny")
def tiny(
    out: Annotated[Path, typer.Argument(metavar="DIR", help="New or empty directory for the checkpoint.")],
    fp8: Annotated[bool, typer.Option("--fp8", help="Write the FP8 release layout instead of bf16.")] = False,
    trained: Annotated[
        bool,
        typer.Option(
            "--trained",
            help="Train on the local Python sources (about a minute), so that quality numbers mean something.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of the training batches.")] = 0,
    layers: Annotated[
        int, typer.Option(help="Layers, a multiple of 4: every fourth is sparse attention.")
    ] = 4,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
    fresh: FreshFlag = False,
) -> None:
    """Write a tiny Qwen4-Exp checkpoint in the layout of the real release.

    It has both layer kinds, fused experts, the n-gram table in 16 shards, MTP and vision tensors, a
    tokenizer and a chat template. The same options on the same machine give the same bytes.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.units import format_bytes
        from q38.synth.tiny import plan_tiny, synth_tiny

        if dry_run:
            result = plan_tiny(fp8=fp8, layers=layers)
        else:
            result = synth_tiny(
                out,
                fp8=fp8,
                trained=trained,
                seed=seed,
                layers=layers,
                fresh=fresh,
                progress=console.progress,
            )
        verb = "would hold" if dry_run else "holds"
        console.print(f"{out} {verb} {result['tensors']} tensors, {format_bytes(result['tensor_bytes'])}")
        if training := result.get("training"):
            console.print(
                f"trained {training['steps']} steps: held-out loss {training['loss_before']:.3f} -> {training['loss_after']:.3f} nats/token"
            )
        console.emit({"out": str(out), "dry_run": dry_run, **result})


from q38.cli import synth_full, synth_sparse  # noqa: E402, F401
