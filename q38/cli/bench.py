"""q38 bench: speed. `bench` is the group; q38.cli.bench_kernels adds `q38 bench kernels` to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, JsonFlag, session

bench = typer.Typer(no_args_is_help=True, help="Measure speed: of a running server, or of the kernels.")
app.add_typer(bench, name="bench")


@bench.command("serve")
def serve(
    url: Annotated[
        str, typer.Option(help="Root address of an OpenAI-compatible server.")
    ] = "http://127.0.0.1:30000",
    contexts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas; the chat template counts.")
    ] = "128,2048",
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate per request.")] = 64,
    repeats: Annotated[
        int, typer.Option(help="Measured requests per context, after one warm-up request.")
    ] = 3,
    model: Annotated[
        str | None,
        typer.Option(help="Model name; default: the first that the server lists.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="Q38_API_KEY", help="The server's API key.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the order of the text's passages.")] = 0,
    stall_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds of silence after which a request has failed.")
    ] = 600.0,
    out: Annotated[
        Path | None,
        typer.Option("-o", "--out", help="Also write the JSON result to this file.", show_default=False),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
) -> None:
    """Measure time to first token, prefill tokens/s and decode tokens/s of a running server.

    Requests go one at a time, with varied text in many languages and a nonce in front, so that no
    prefix cache helps. The figures are medians over the repeats; prompt lengths are the server's own
    counts. One failed request fails the benchmark.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.base.errors import InputError
        from q38.checkpoint.writer import write_json
        from q38.measure.bench import bench_serve, check_arguments, check_writable

        try:
            lengths = [int(part) for part in contexts.split(",")]
        except ValueError:
            raise InputError(
                f"'{contexts}' is not a list of numbers", where="--contexts", remedy="write 128,2048"
            ) from None
        check_arguments(lengths, max_tokens, repeats)
        if dry_run:
            requests = 2 + len(lengths) * (repeats + 1)
            console.print(f"would send {requests} requests to {url}" + (f" and write {out}" if out else ""))
            console.emit(
                {"dry_run": True, "url": url, "requests": requests, "out": str(out) if out else None}
            )
            return
        if out is not None:
            check_writable(out)
        result = bench_serve(
            url,
            contexts=lengths,
            max_tokens=max_tokens,
            repeats=repeats,
            model=model,
            api_key=api_key,
            seed=seed,
            stall_s=stall_timeout,
            progress=console.progress,
        )
        server = result["server"]
        console.table(
            ("context", "prompt tokens", "first token s", "prefill tok/s", "decode tok/s", "inter-token ms", "p95 ms"),
            [
                (c["context"], c["prompt_tokens"], c["first_token_s"], c["prefill_tokens_per_s"], c["decode_tokens_per_s"],
                 c["inter_token_ms"]["median"], c["inter_token_ms"]["p95"])
                for c in result["contexts"]
            ],
            title=f"{server['model']} at {server['url']}, medians of {repeats}, {max_tokens} tokens generated",
        )  # fmt: skip
        if out is not None:
            write_json(out, result)
            console.print(f"wrote {out}")
        console.emit(result)


# Last, because it adds its command to the group above.
from q38.cli import bench_kernels  # noqa: E402, F401
