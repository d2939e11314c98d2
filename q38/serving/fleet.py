"""Several servers behind one address: SGLang's router in front of what `q38 serve` started."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from q38.base.errors import InputError, ResourceError
from q38.base.progress import SILENT, Progress
from q38.serving.client import Client
from q38.serving.engines import Launch, ServeOptions
from q38.serving.launch import Server, foreground, started_child
from q38.serving.preflight import check_exposure, claim_port
from q38.serving.records import running
from q38.serving.requirements import lacking

ROUTER = "sglang-router"  # its name among the engines of `q38 serve status`
POLICIES = ("cache_aware", "round_robin", "random", "power_of_two")


@dataclass(frozen=True)
class FleetOptions:
    """What one router is started with.

    servers: addresses of the servers; empty for all that `q38 serve` runs here.
    policy: which server a request goes to, of POLICIES. cache_aware: the one that has seen most of the prompt, unless it is
        busier than the others.
    api_key: of the router, and of every server behind it.
    """

    servers: tuple[str, ...] = ()
    policy: str = "cache_aware"
    host: str = "127.0.0.1"
    port: int = 30100
    api_key: str | None = None
    log: Path | None = None
    start_timeout_s: float = 120.0


def serve_fleet(
    options: FleetOptions,
    *,
    on_ready: Callable[[Server], None] = lambda server: None,
    progress: Progress = SILENT,
) -> int:
    """Route in the foreground, as q38.serving.launch.serve serves: the same signals, PID file and exit codes.

    Raises:
        as `plan_fleet`; Q38Error when the router dies or no token comes through it in time.
    """
    served, launch = plan_fleet(options)
    servers = len(launch.figures["servers"])
    started = started_child(served, ROUTER, launch, progress, listens=lambda client: _knows(client, servers))
    return foreground(started, on_ready)


def plan_fleet(options: FleetOptions) -> tuple[ServeOptions, Launch]:
    """Check everything, and make the router's command.

    Raises:
        InputError: unknown policy, bad address, port or key, or servers of different models.
        ResourceError: the router is not installed, no server runs or one does not answer, the port is in use.
    """
    if options.policy not in POLICIES:
        raise InputError(
            f"unknown policy '{options.policy}'", where="--policy", remedy=f"known: {', '.join(POLICIES)}"
        )
    check_exposure(options.host, options.api_key)
    if missing := lacking("fleet"):
        raise ResourceError(str(missing[0]), where="q38 serve fleet", remedy=missing[0].remedy)
    servers = list(options.servers) or [r.url for r in running() if r.state == "ready" and r.engine != ROUTER]
    if not servers:
        raise ResourceError(
            "no q38 server is ready here",
            where="q38 serve fleet",
            remedy="start some with q38 serve MODEL --port PORT, or name others with --server URL",
        )
    model = _common_model(servers, options.api_key)
    port = claim_port(options.host, options.port)
    settings = {
        "worker_urls": servers,
        "policy": options.policy,
        "host": options.host,
        "port": port,
        # Its own figures; without a port it takes 29000, and the second router of a machine fails.
        "prometheus_host": "127.0.0.1",
        "prometheus_port": claim_port("127.0.0.1", 0),
        # These servers run a request or a few at a time: one that waits should go to an idle server.
        "balance_abs_threshold": 1,
        "health_check_interval_secs": 10,
        "shutdown_grace_period_secs": 10,
        "log_level": "info",
    }
    command = [sys.executable, "-m", "q38.serving.fleet_router", json.dumps(settings)]
    lines = [f"{server} serves {model}" for server in servers]
    served = ServeOptions(
        Path(), None, ROUTER, options.host, port, model, options.api_key, options.log, options.start_timeout_s
    )
    return served, Launch(command, plan=lines, figures={"servers": servers, "policy": options.policy})


def _knows(router: Client, servers: int) -> bool:
    """Whether the router has found so many servers healthy; it answers /health before it knows any."""
    try:
        return bool(json.loads(router.text("/readiness") or "{}").get("healthy_workers") == servers)
    except ValueError:
        return False


def dry_run(options: FleetOptions) -> dict[str, Any]:
    """What would be started, after every check."""
    served, launch = plan_fleet(options)
    return {"url": served.url, "model": served.served_name, **launch.figures}


def _common_model(servers: Sequence[str], api_key: str | None) -> str:
    """The name of the model that all of them serve.

    Raises:
        InputError: they differ. ResourceError, ServerError: one does not answer.
    """
    names: dict[str, str] = {}
    for server in servers:
        with Client(server, api_key=api_key or "none") as client:
            names[server] = str(client.models()[0]["id"])
    first, name = next(iter(names.items()))
    for server, other in names.items():
        if other != name:
            raise InputError(
                f"serves {other}, and {first} serves {name}",
                where=server,
                remedy="give servers of one model, or the same --name to all",
            )
    return name
