"""Run behaviours against a server, one after the other, and keep going while it answers."""

from __future__ import annotations

import time
from collections.abc import Sequence

from q38.base.errors import InputError, ResourceError
from q38.base.progress import SILENT, Progress
from q38.measure.behaviour.registry import Behaviour
from q38.measure.behaviour.row import Row, Unsupported, protocol, unjudged
from q38.measure.behaviour.target import Target
from q38.measure.checks import Part
from q38.serving.client import ServerError

PROTOCOL, CAPABILITY = "protocol", "capability"


def run_behaviours(
    target: Target, behaviours: Sequence[Behaviour], *, progress: Progress = SILENT
) -> list[Part]:
    """Two parts, "protocol" and "capability"; their "seconds" say how long each behaviour took.

    A request that fails fails its behaviour's row. When the server then does not even answer a short
    request, the rest is left out, and says so.
    """
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    gone: str | None = None
    with progress.task("verify", len(behaviours), "checks") as task:
        for behaviour in behaviours:
            task.note(behaviour.name)
            if gone:
                rows.append(unjudged(behaviour.name, f"not run: {gone}"))
            else:
                begun = time.perf_counter()
                found, gone = _run(target, behaviour)
                rows += found
                seconds[behaviour.name] = round(time.perf_counter() - begun, 3)
            task.advance(1)
    parts = []
    for name in (PROTOCOL, CAPABILITY):
        checks = [row.check for row in rows if row.kind == name]
        if checks:
            parts.append(Part(name, checks, {"seconds": seconds} if name == PROTOCOL else {}))
    return parts


def _run(target: Target, behaviour: Behaviour) -> tuple[list[Row], str | None]:
    """(rows, why the server is gone or None)."""
    try:
        return behaviour.check(target), None
    except Unsupported as why:
        return [unjudged(behaviour.name, str(why))], None
    except (ServerError, ResourceError) as error:
        row = protocol(behaviour.name, [error.what], where=error.where or target.client.url)
        return [row], _silence(target)
    except InputError as error:
        # 401 and 403 become this; anything else is a fault in what was asked for.
        return [protocol(behaviour.name, [error.what], where=error.where or target.client.url)], None


def _silence(target: Target) -> str | None:
    """Why a short request is not answered; None where it is."""
    try:
        target.require_alive()
    except (ServerError, ResourceError) as error:
        return f"the server does not answer any more ({error.what})"
    return None
