"""q38 patch-sglang: q38's extension of an installed SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from q38.cli.app import app
from q38.cli.console import DebugFlag, DryRunFlag, JsonFlag, session

patch = typer.Typer(
    no_args_is_help=True,
    help="Check, switch and export q38's extension of SGLang. Exit code 3 without SGLang or extension.",
)
app.add_typer(patch, name="patch-sglang")

TreeOption = Annotated[
    Path | None,
    typer.Option("--tree", help="SGLang source tree; default: the installed package.", show_default=False),
]


@patch.command("check")
def check(json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Show which SGLang is installed and whether q38's extension fits it."""
    _act(json, debug)


@patch.command("enable")
def enable(json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False) -> None:
    """Let every SGLang process of this environment load the extension; q38 serve needs no enabling."""
    _act(json, debug)


@patch.command("disable")
def disable(json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False) -> None:
    """Undo enable."""
    _act(json, debug)


@patch.command("verify")
def verify(json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Load SGLang with the extension in a child process and check that every hook is in place."""
    _act(json, debug)


@patch.command("export-patch")
def export_patch(
    out: Annotated[Path, typer.Option("-o", "--out", help="File for the unified diff.", show_default=False)],
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
) -> None:
    """Write the extension's changes as a unified diff, for people who want them in their own tree."""
    _act(json, debug)


@patch.command("apply")
def apply(
    tree: TreeOption = None, json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False
) -> None:
    """Apply that diff to an SGLang tree, with a backup; refused on an unknown version or edited files."""
    _act(json, debug)


@patch.command("revert")
def revert(
    tree: TreeOption = None, json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False
) -> None:
    """Undo apply, byte for byte."""
    _act(json, debug)


def _act(json: bool, debug: bool) -> None:
    with session(json_mode=json, debug=debug):
        from q38.serving.sglang_extension import refuse

        refuse()
