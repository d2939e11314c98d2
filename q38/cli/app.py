"""The q38 command. Each verb is one module beside this file and registers itself on `app`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import typer
import typer.core

import q38
from q38.base import settings
from q38.base.errors import InputError
from q38.base.process import end_with_parent

# In the order of the pipeline, which is also the order of `q38 --help`.
VERBS = (
    "run", "doctor", "synth", "inspect", "plan", "split_ple", "quantize", "requant_int8", "tune_triton", "build_placement",
    "patch_sglang", "serve", "verify", "bench", "oracle", "release",
)  # fmt: skip


class _Verbs(typer.core.TyperGroup):
    """Typer lists plain commands before groups; this keeps the order of `VERBS`."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for verb in VERBS if (name := verb.replace("_", "-")) in self.commands]


app = typer.Typer(
    name="q38",
    cls=_Verbs,
    help="Qwen3.8-Flash-Next from its bf16 checkpoint to a server on one 24 GB GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(q38.__version__)
        raise typer.Exit


def register_verbs() -> None:
    """Import every verb module; none of them imports torch or another heavy package at its top."""
    for verb in VERBS:
        if (Path(__file__).parent / f"{verb}.py").exists():
            importlib.import_module(f"q38.cli.{verb}")


def main() -> None:
    """Run the command line and exit with its code."""
    end_with_parent(settings.take_parent())
    settings.calm_threads()
    register_verbs()
    try:
        result = app(prog_name="q38", standalone_mode=False)
    except typer.TyperException as error:
        sys.exit(_refuse_usage(error))
    except typer.Abort:
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else 0)


class UsageError(InputError):
    """The command line itself is wrong."""


def _refuse_usage(error: typer.TyperException) -> int:
    """Print a usage error the way every other refusal is printed: one line, and JSON with --json."""
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(error.format_message() + "\n")
        return error.exit_code
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "q38"
    what = " ".join(error.format_message().split()).rstrip(".")
    refusal = UsageError(
        what, where=command.removeprefix("q38").strip() or None, remedy=f"see {command} --help"
    )
    if "--json" in sys.argv:
        sys.stdout.write(json.dumps(refusal.to_dict(), ensure_ascii=False) + "\n")
    sys.stderr.write(f"q38: {refusal}\n")
    return error.exit_code
