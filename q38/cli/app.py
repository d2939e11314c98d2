"""The q38 command: one module per verb, imported only when that verb runs."""

from __future__ import annotations

import importlib
from pathlib import Path

import typer

import q38

app = typer.Typer(
    name="q38",
    help="Qwen3.8-Flash-Next from its bf16 checkpoint to a server on one 24 GB GPU.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    if version:
        typer.echo(q38.__version__)
        raise typer.Exit


# In the order of the pipeline, which is also the order of `q38 --help`.
VERBS = (
    "run", "doctor", "synth", "inspect", "plan", "split_ple", "quantize", "requant_int8", "tune_triton", "build_placement",
    "patch_sglang", "serve", "verify", "bench", "oracle",
)  # fmt: skip


def register_verbs() -> None:
    """Import every verb module; each registers itself on `app`."""
    for verb in VERBS:
        if (Path(__file__).parent / f"{verb}.py").exists():
            importlib.import_module(f"q38.cli.{verb}")


def main() -> None:
    """Run the command line."""
    register_verbs()
    app()
