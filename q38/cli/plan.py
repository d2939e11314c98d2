"""`q38 plan`: what a recipe costs and whether the result fits a machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from q38.base.errors import InputError, ResourceError
from q38.base.units import GIB, format_bytes, parse_bytes
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, JsonFlag, session

if TYPE_CHECKING:
    from q38.recipe.budget import Sizes
    from q38.residency.simulate import Outcome
    from q38.serving.recipe_plan import Fit


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
        str, typer.Option(help="Host memory the server may use, like 28GiB, or machine: what is free here.")
    ] = "28GiB",
    context: Annotated[
        int | None,
        typer.Option(
            help="Tokens of prompt and answer together; default: the model's limit.", show_default=False
        ),
    ] = None,
    kv: Annotated[
        str, typer.Option(help="KV cache format, bf16, fp8, int8, int8ring_int4, int4, or auto.")
    ] = "auto",
    requests: Annotated[
        int, typer.Option("--requests", "--sequences", help="Requests that run at once.")
    ] = 1,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens of one prefill step; default: 2048 to 8192, as the GPU's memory allows.",
            show_default=False,
        ),
    ] = None,
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
        str | None,
        typer.Option(
            help="With --trace: bytes per second the GPU reads from host memory; default: 51GB.",
            show_default=False,
        ),
    ] = None,
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

    Reads config.json alone, and plans as q38 serve does, with its defaults: --gpu and --ram stand for its --gpu-memory and --ram.
    Exits 3 with the shortfall in GiB when the machine is too small.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.serving.machine import memory_sizes
        from q38.serving.recipe_plan import plan_recipe
        from q38.serving.sglang_settings import SglangSettings

        replay = None if trace is None else _Replay(trace, config, link, resident, figure)
        if replay is None:
            refuse_without_trace({"--link": link, "--resident": resident, "--figure": figure})
        gpu, ram = memory_sizes(gpu, ram)
        settings = SglangSettings(context=context, requests=requests, chunk=chunk, kv=kv)
        cost, fit = plan_recipe(
            config, recipe, gpu=gpu, ram=ram, settings=settings, source_layout=source_layout
        )
        _show_cost(console, cost)
        if isinstance(fit, ResourceError):
            raise fit
        _show_fit(console, fit)
        outcomes = [] if replay is None else replay.run(console, fit.resident_per_layer, cost.row_bytes)
        console.emit(
            {"sizes": asdict(cost), "machine": fit.to_dict(), "replay": [o.to_dict() for o in outcomes]}
        )


def refuse_without_trace(given: dict[str, object]) -> None:
    """Refuse options that only a replay reads.

    Raises:
        InputError: names the first.
    """
    for option, value in given.items():
        if value is not None:
            raise InputError("is for --trace", where=option, remedy="give both, or neither")


class _Replay:
    """The replay of a trace: opened, and its options checked, before anything is computed."""

    def __init__(
        self, trace: Path, config: Path, link: str | None, resident: int | None, figure: Path | None
    ) -> None:
        from q38.residency.simulate import LINK_RATE, read_model_trace, require_figure, require_resident

        self.trace = read_model_trace(trace, config)
        self.link_rate = LINK_RATE if link is None else float(parse_bytes(link, where="--link"))
        self.resident, self.figure = resident, figure
        if resident is not None:
            require_resident(resident, self.trace)
        if figure is not None:
            require_figure(figure)

    def run(self, console: Console, planned: int, row_bytes: int) -> list[Outcome]:
        """Replay it, with `planned` experts a layer unless --resident says otherwise."""
        from q38.residency.simulate import Settings, simulate_and_plot

        resident = planned if self.resident is None else self.resident
        outcomes = simulate_and_plot(
            self.trace,
            Settings(resident, row_bytes, link_rate=self.link_rate),
            figure=self.figure,
            progress=console.progress,
        )
        console.table(
            ("policy", "S", "hit rate", "mass hit rate", "host MB/token", "moved MB/token", "ms/token"),
            [o.row() for o in outcomes],
            title="\nReplay",
        )
        return outcomes


def _show_cost(console: Console, cost: Sizes) -> None:
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


def _show_fit(console: Console, fit: Fit) -> None:
    places = (("GPU", fit.gpu, fit.plan.device["left"]), ("host", fit.host, fit.plan.host["left"]))
    for place, parts, left in places:
        console.table(
            (place, "GiB"), [*((what, n / GIB) for what, n in parts.items()), ("left", left / GIB)], title=""
        )
    full = fit.resident_when_full
    later = f", {full} once the whole context is in use" if full < fit.resident_per_layer else ""
    console.print(
        f"\nKV cache: {fit.plan.kv}, {fit.resolved.context:,} tokens; prompts in steps of {fit.plan.chunk:,} tokens"
    )
    console.print(
        f"S = {fit.resident_per_layer} of {fit.experts} experts per layer in VRAM{later}; "
        f"{fit.host['pinned expert rows']:,} bytes pinned; {fit.plan.spare} slots stay free to exchange rows"
    )
