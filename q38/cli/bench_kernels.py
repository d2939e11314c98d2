"""q38 bench kernels: what each GPU kernel reaches, beside the machine's limits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.cli.bench import bench
from q38.cli.console import DebugFlag, JsonFlag, session


@bench.command("kernels")
def bench_kernels(
    model: Annotated[
        Path | None,
        typer.Argument(
            metavar="[MODEL]",
            help="Directory whose config.json gives the sizes; default: those of Qwen3.8-Flash-Next.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Routing trace (safetensors) for the decode kernel; default: synthetic uniform routing.",
            show_default=False,
        ),
    ] = None,
    configs: Annotated[
        Path | None,
        typer.Option(
            help="Tuned configs (JSON) of q38 tune-triton; default: the shipped ones for this GPU.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        int, typer.Option(help="MoE layers in one timed graph; their rows should exceed the L2 cache.")
    ] = 24,
    host_share: Annotated[
        float,
        typer.Option(help="Fraction of the selected expert rows that the mixed case keeps on the host."),
    ] = 0.16,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also write the JSON result to this file.", show_default=False),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Measure the decode, prefill, INT8, KV and row-moving kernels at a model's real sizes.

    Each line gives the time, the rate in GB/s or TFLOP/s, and its fraction of the limit measured in the
    same run: a device copy, a pinned copy over the link, or a matrix product. Needs a CUDA GPU.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.checkpoint.writer import write_json
        from q38.measure.files import require_writable
        from q38.measure.kernels import bench_model_kernels, refuse_other

        if out is not None:
            refuse_other(out)
            require_writable(out)
        result = bench_model_kernels(
            model,
            trace=trace,
            configs=configs,
            layers=layers,
            host_share=host_share,
            progress=console.progress,
        )
        limits = result["limits"]
        console.table(
            ("kernel", "case", "tokens", "us", "GB/s or TFLOP/s", "of limit"),
            [
                (r["kernel"], r["case"], r["tokens"], r["us"], r["rate"] / (1e9 if r["unit"] == "B" else 1e12), r["fraction"])
                for r in result["results"]
            ],
            title=f"{result['device']}: copy {limits['copy_GBs']:.0f} GB/s, link {limits['link_GBs']:.1f} GB/s, "
            f"bf16 product {limits['matmul_TFLOPs']:.0f} TFLOP/s; {result['routing']} routing",
        )  # fmt: skip
        if out is not None:
            write_json(out, result)
            console.print(f"wrote {out}")
        console.emit(result)
