"""q38 serve fleet: one address in front of several servers."""

from __future__ import annotations

from typing import Annotated

import typer

from q38.cli.console import DebugFlag, DryRunFlag, JsonFlag, session
from q38.cli.serve import serve
from q38.cli.serve_options import HostOption, LogOption, PortOption, StartTimeoutOption


@serve.command("fleet")
def fleet(
    server: Annotated[
        list[str] | None,
        typer.Option(
            "--server",
            help="Address of a server; may be given several times. Default: every server that q38 serve runs here.",
            show_default=False,
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Which server a request goes to: cache_aware (the one that has seen most of the prompt, unless it is busier), "
            "round_robin, random, power_of_two."
        ),
    ] = "cache_aware",
    host: HostOption = "127.0.0.1",
    port: PortOption = 30100,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="Q38_API_KEY",
            help="Key of the servers, which clients must send to the router too.",
            show_default=False,
        ),
    ] = None,
    log: LogOption = None,
    start_timeout: StartTimeoutOption = 120.0,
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
) -> None:
    """Put SGLang's router in front of several servers of one model, until Ctrl-C or SIGTERM.

    The servers go on when it ends. q38 serve status lists it; q38 serve stop --port PORT stops it. It needs the extra
    q38[fleet]. With --json it prints one document when ready.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import fleet as fleets
        from q38.serving.launch import Server

        options = fleets.FleetOptions(tuple(server or ()), policy, host, port, api_key, log, start_timeout)
        if dry_run:
            plan = fleets.dry_run(options)
            for key, value in plan.items():
                console.print(f"{key}: {value}")
            console.emit({"dry_run": True, **plan})
            return

        def on_ready(router: Server) -> None:
            console.print(
                f"ready: {router.url} serves {router.model} (router pid {router.pid}, log {router.log})"
            )
            console.emit(router.to_dict())

        code = fleets.serve_fleet(options, on_ready=on_ready, progress=console.progress)
        console.progress.say("router stopped")
        console.fail(code)
