"""Every command of the program, read from it."""

from __future__ import annotations

from typing import Any

import typer

from q38.cli.app import app, register_verbs
from q38.cli.docs import leaves

register_verbs()
ROOT: Any = typer.main.get_command(app)
COMMANDS: dict[str, Any] = {path: c for name, verb in ROOT.commands.items() for path, c in leaves(name, verb)}


def options(path: str) -> set[str]:
    return {spelling for p in COMMANDS[path].params for spelling in p.opts}
