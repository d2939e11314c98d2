"""`q38 plan`: what a recipe costs and whether the result fits a machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from q38.base.units import GIB, format_bytes, parse_bytes
from q38.cli.app import app
from q38.cli.console import DebugFlag, JsonFlag, session


@app.command("plan")
def plan(
    config: Annotated[
        Path, typer.Argument(help="config.json of the model, or a checkpoint directory that holds one.")
    ],
    recipe: Annotated[
        str, typer.Option("--recipe", "-r", help="Recipe file, or the name of a shipped one.")
    ] = "quality-24gb",
    gpu: Annotated[
        str, typer.Option(help="GPU memory the server may use, like 23.4GiB, or machine: what is free here.")
    ] = "23.4GiB",
    ram: Annotated[
        str, typer.Option(help="Host memory, like 30GiB, or machine: what is free here.")
    ] = "30GiB",
    context: Annotated[int, typer.Option(min=1, help="Tokens of context to hold.")] = 32768,
    kv: Annotated[str, typer.Option(help="KV cache format: bf16, fp8, int8, int4 or int8ring_int4.")] = "fp8",
    sequences: Annotated[int, typer.Option(min=1, help="Sequences served at once.")] = 1,
    chunk: Annotated[int, typer.Option(min=1, help="Prefill chunk in tokens.")] = 2048,
    source_layout: Annotated[
        str, typer.Option(help="Layout of the source for its own size: bf16 or fp8.")
    ] = "bf16",
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Routing trace (safetensors) to replay against residency policies, at the planned S."
        ),
    ] = None,
    link: Annotated[
        str, typer.Option(help="With --trace: bytes per second the GPU reads from host memory.")
    ] = "51GB",
    resident: Annotated[
        int | None, typer.Option(help="With --trace: experts per layer in VRAM instead of the planned S.")
    ] = None,
    figure: Annotated[
        Path | None, typer.Option(help="With --trace: plot the policies over S to this PNG or SVG file.")
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Show bytes per parameter group, bits per weight, disk per step, and how the model lies on one GPU and its host.

    Reads config.json alone. Exits 3 with the shortfall in GiB when the machine is too small.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.recipe.budget import make_plan
        from q38.serving.machine import memory_sizes

        gpu, ram = memory_sizes(gpu, ram)
        document, failure = make_plan(
            config,
            recipe,
            gpu=gpu,
            ram=ram,
            context=context,
            kv_format=kv,
            sequences=sequences,
            chunk=chunk,
            source_layout=source_layout,
        )
        cost, machine = document.sizes, document.machine
        rows = [(g.group, g.parameters, g.tensors, g.bytes, g.bits_per_weight) for g in cost.groups]
        console.table(("group", "parameters", "tensors", "bytes", "bits/weight"), rows)
        console.print(
            f"\n{cost.tensors:,} tensors, {cost.tensor_bytes:,} tensor bytes (file headers, about {cost.header_bytes:,} bytes, not "
            f"among them), and {format_bytes(cost.ngram_bytes)} of n-gram table beside them"
        )
        console.print(
            f"{cost.bits_per_weight:.3f} bits per weight by bytes; {cost.published_bits_per_weight:.3f} by the published formula"
        )
        console.table(("step", "disk bytes"), list(cost.disk.items()), title="\nDisk")
        if failure is not None:
            raise failure
        assert machine is not None
        console.table(
            ("GPU", "GiB"),
            [(k, v / GIB) for k, v in machine.gpu.items()] + [("left", machine.gpu_left / GIB)],
            title="",
        )
        console.table(
            ("host", "GiB"),
            [(k, v / GIB) for k, v in machine.host.items()] + [("left", machine.ram_left / GIB)],
            title="",
        )
        console.print(
            f"\nS = {machine.resident_per_layer} of {machine.experts} experts per layer in VRAM; {machine.host['pinned expert rows']:,} bytes pinned"
        )
        outcomes = []
        if trace is not None:
            from q38.residency.simulate import Settings, simulate_file

            settings = Settings(
                machine.resident_per_layer if resident is None else resident,
                cost.row_bytes,
                link_rate=parse_bytes(link, where="--link"),
            )
            outcomes = simulate_file(trace, config, settings, figure=figure, progress=console.progress)
            console.table(
                ("policy", "S", "hit rate", "mass hit rate", "host MB/token", "moved MB/token", "ms/token"),
                [o.row() for o in outcomes],
                title="\nReplay",
            )
        console.emit(
            {"sizes": asdict(cost), "machine": machine.to_dict(), "replay": [o.to_dict() for o in outcomes]}
        )
