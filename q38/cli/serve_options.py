"""Options that every verb has which listens: q38 serve and q38 serve fleet."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

HostOption = Annotated[str, typer.Option(help="Address to listen on. Other than loopback needs an API key.")]
PortOption = Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")]
LogOption = Annotated[
    Path | None,
    typer.Option(
        help="Log file, appended to; default: serve-PORT.log in the state directory.", show_default=False
    ),
]
StartTimeoutOption = Annotated[
    float, typer.Option(min=1, help="Seconds to wait for the first generated token before giving up.")
]
