"""q38 serve: serve a model in the foreground; status and stop of servers that run."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, JsonFlag, session
from q38.cli.serve_options import HostOption, LogOption, PortOption, StartTimeoutOption

START = "start"
_HELP = ("-h", "--help")


class ServeGroup(typer.core.TyperGroup):
    """`q38 serve MODEL` means `q38 serve start MODEL`. A model directory named like a sub-verb needs a ./ before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and (args[0] in _HELP or args[0] not in self.commands):
            args = [START, *args]
        result: list[str] = super().parse_args(ctx, args)
        return result


serve = typer.Typer(
    cls=ServeGroup,
    no_args_is_help=True,
    help="Serve a model over the OpenAI API; status and stop of running servers.",
)
app.add_typer(serve, name="serve")

PortFilter = Annotated[
    int | None,
    typer.Option("--port", help="Port of the server; default: the only one that runs.", show_default=False),
]


@serve.command(START, epilog="Also: q38 serve status, q38 serve stop.")
def start(
    model: Annotated[Path, typer.Argument(help="Directory of the model.", show_default=False)],
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the split n-gram table; default: MODEL/ple, then ple/ beside MODEL.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            help="sglang, transformers, or auto: sglang where it can run or an option of its own is given, else transformers."
        ),
    ] = "auto",
    host: HostOption = "127.0.0.1",
    port: PortOption = 30000,
    name: Annotated[
        str | None,
        typer.Option(help="Model name in the API; default: the directory's name.", show_default=False),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="Q38_API_KEY", help="Key that clients must send as a bearer token.", show_default=False
        ),
    ] = None,
    log: LogOption = None,
    start_timeout: StartTimeoutOption = 900.0,
    device: Annotated[
        str | None,
        typer.Option(
            help="sglang: cuda, or cpu for tests and tiny models; default: cuda.", show_default=False
        ),
    ] = None,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            help="sglang: GPU memory that the server may use, for example 23.4GiB; default: what is free.",
            show_default=False,
        ),
    ] = None,
    ram: Annotated[
        str | None,
        typer.Option(
            help="sglang: host memory that it may use, for example 28GiB; default: what is available.",
            show_default=False,
        ),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            help="sglang: tokens of prompt and answer together; default: the model's limit.",
            show_default=False,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="sglang: requests that run at once; further ones wait; default: 1.", show_default=False
        ),
    ] = None,
    chunk: Annotated[
        int | None,
        typer.Option(
            help="sglang: prompt tokens of one prefill step; default: 2048 to 8192, as the GPU's memory allows.",
            show_default=False,
        ),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(
            help="sglang: KV cache format, bf16, fp8, int8, int8ring_int4, int4, or auto; default: auto on a GPU, bf16 elsewhere.",
            show_default=False,
        ),
    ] = None,
    kv_ring: Annotated[
        int | None,
        typer.Option(
            help="sglang: newest tokens that int8ring_int4 keeps in INT8; default: 8192.", show_default=False
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="sglang: routing profile from q38 build-placement, or none; default: placement.safetensors in MODEL/q38, then "
            "beside MODEL, else all experts alike.",
            show_default=False,
        ),
    ] = None,
    adapt: Annotated[
        bool | None,
        typer.Option(
            "--adapt/--no-adapt",
            help="sglang: exchange expert rows while serving, so that those in GPU memory are those that are read; default: on a GPU.",
            show_default=False,
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="sglang: keep the cache of finished requests for prompts that begin alike; default: on a GPU that runs one request at a time.",
            show_default=False,
        ),
    ] = None,
    resident: Annotated[
        int | None,
        typer.Option(
            help="sglang: experts of each layer that start in GPU memory; default: as many as fit.",
            show_default=False,
        ),
    ] = None,
    return_routes: Annotated[
        bool | None,
        typer.Option(
            "--return-routes",
            help="sglang: answers can name the experts that each token chose, for q38 build-placement --server --trace.",
            show_default=False,
        ),
    ] = None,
    overlap: Annotated[
        bool | None,
        typer.Option(
            "--overlap/--no-overlap",
            help="sglang: schedule a decode step while the one before runs; default: on, where the n-gram rows allow it.",
            show_default=False,
        ),
    ] = None,
    int8_mixes: Annotated[
        bool | None,
        typer.Option(
            "--int8-mixes",
            help="sglang: round the matrices of the hyper-connections to INT8 while loading; default: they stay bf16.",
            show_default=False,
        ),
    ] = None,
    check_finite: Annotated[
        bool | None,
        typer.Option(
            "--check-finite",
            help="sglang: name the first module of a prompt step whose output is not finite; slow, for finding faults.",
            show_default=False,
        ),
    ] = None,
    tp: Annotated[
        int | None,
        typer.Option(help="sglang: GPUs that share the model; only 1 is possible.", show_default=False),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
) -> None:
    """Serve a model over the OpenAI chat API until Ctrl-C or SIGTERM.

    It prints "ready" once a token was really generated. A server that dies, or this command killed by
    any signal, leaves no process behind. With --json it prints one document when ready: url, engine,
    model, pid, log. Exit code 130 after Ctrl-C, 0 after SIGTERM or q38 serve stop.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import launch
        from q38.serving.engines import ServeOptions
        from q38.serving.sglang_settings import SglangSettings

        settings = SglangSettings(
            device,
            _bytes(gpu_memory, "--gpu-memory"),
            _bytes(ram, "--ram"),
            context,
            requests,
            chunk,
            kv,
            profile,
            prefix_cache,
            kv_ring,
            adapt=adapt,
            resident=resident,
            return_routes=return_routes,
            tp=tp,
            overlap=overlap,
            int8_mixes=int8_mixes,
            check_finite=check_finite,
        )
        options = ServeOptions(model, ple, engine, host, port, name, api_key, log, start_timeout, settings)
        if dry_run:
            plan = launch.dry_run(options)
            for key, value in plan.items():
                console.print(f"{key}: {value}")
            console.emit({"dry_run": True, **plan})
            return

        def on_ready(server: launch.Server) -> None:
            console.print(
                f"ready: {server.url} serves {server.model} (engine {server.engine}, pid {server.pid}, log {server.log})"
            )
            console.emit(server.to_dict())

        code = launch.serve(options, on_ready=on_ready, progress=console.progress)
        console.progress.say("server stopped")
        console.fail(code)


def _bytes(text: str | None, option: str) -> int | None:
    from q38.base.units import parse_bytes

    return None if text is None else parse_bytes(text, where=option)


@serve.command("status")
def status(port: PortFilter = None, json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Show the servers of this user that run, and whether each answers."""
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import records
        from q38.serving.client import Client
        from q38.serving.preflight import check_port

        if port is not None:
            check_port(port)
        rows = []
        for record in records.running():
            if port is None or record.port == port:
                with Client(record.url) as client:
                    rows.append({**asdict(record), "answers": client.healthy()})
        if rows:
            keys = ("port", "pid", "state", "answers", "engine", "model", "log")
            console.table(keys, [[str(row[key]) for key in keys] for row in rows])
        else:
            console.print("no q38 server runs" + (f" on port {port}" if port is not None else ""))
        console.emit({"servers": rows})


@serve.command("stop")
def stop(port: PortFilter = None, json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Stop a running server: SIGTERM, and SIGKILL if it has not ended after 15 seconds."""
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import records
        from q38.serving.preflight import check_port

        if port is not None:
            check_port(port)
        record = records.stop(port)
        console.print(f"stopped {record.model} on port {record.port} (pid {record.pid})")
        console.emit({"stopped": asdict(record)})


from q38.cli import serve_fleet as _serve_fleet  # noqa: E402, F401  registers `q38 serve fleet`
