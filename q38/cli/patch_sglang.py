"""q38 patch-sglang: q38's extension of an installed SGLang."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, DryRunFlag, JsonFlag, session

patch = typer.Typer(
    no_args_is_help=True,
    help="Check, switch, export and apply q38's extension of SGLang. Exit code 3 without SGLang.",
)
app.add_typer(patch, name="patch-sglang")

TreeOption = Annotated[
    Path | None,
    typer.Option("--tree", help="SGLang source tree; default: the installed package.", show_default=False),
]


@patch.command("check")
def check(tree: TreeOption = None, json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Show what each mechanism of the extension is here: native, plugin, patched or unsupported.

    Needs no GPU and imports nothing of SGLang. Exit code 1 when one is unsupported.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import sglang_extension
        from q38.sglang_ext.check import refuse_unfit

        report = sglang_extension.check(tree)
        console.print(f"SGLang {report.release} at {report.tree}")
        console.print(f"plugins in this environment: {', '.join(report.plugins) or 'none'}")
        console.print("enabled for every SGLang process" if report.enabled else "enabled by q38 serve only")
        rows = [(s.mechanism, s.state, s.summary) for s in report.mechanisms]
        console.table(("mechanism", "state", "what it is"), rows)
        console.emit(report.to_dict())
        refuse_unfit(report)


@patch.command("enable")
def enable(json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False) -> None:
    """Let every SGLang process of this environment load the extension; q38 serve needs no enabling."""
    _switch(True, json, debug, dry_run)


@patch.command("disable")
def disable(json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False) -> None:
    """Undo enable."""
    _switch(False, json, debug, dry_run)


@patch.command("verify")
def verify(json: JsonFlag = False, debug: DebugFlag = False) -> None:
    """Load SGLang with the extension in a child process and check that every hook is in place."""
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import sglang_extension

        with console.progress.task("loading SGLang", None, "s"):
            result = sglang_extension.verify()
        console.print(f"SGLang {result['release']}: {len(result['hooks'])} hooks in place")
        console.emit(result)


@patch.command("export-patch")
def export_patch(
    out: Annotated[Path, typer.Option("-o", "--out", help="File for the unified diff.", show_default=False)],
    json: JsonFlag = False,
    debug: DebugFlag = False,
    dry_run: DryRunFlag = False,
) -> None:
    """Write the changes that can live in SGLang's tree as a unified diff, for git apply or patch -p1."""
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import sglang_extension

        result = sglang_extension.export_patch(out, dry_run=dry_run)
        verb = "would write" if dry_run else "wrote"
        console.print(f"{verb} {result['lines']} lines for {len(result['files'])} files to {result['file']}")
        console.emit({"dry_run": dry_run, **result})


@patch.command("apply")
def apply(
    tree: TreeOption = None, json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False
) -> None:
    """Apply that diff to an SGLang tree, with a backup; refused on an unknown version or edited files."""
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import sglang_extension

        result = sglang_extension.apply(tree, dry_run=dry_run)
        _print_files(console, "would patch" if dry_run else "patched", result)
        console.emit({"dry_run": dry_run, **result})


@patch.command("revert")
def revert(
    tree: TreeOption = None, json: JsonFlag = False, debug: DebugFlag = False, dry_run: DryRunFlag = False
) -> None:
    """Undo apply, byte for byte."""
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import sglang_extension

        result = sglang_extension.revert(tree, dry_run=dry_run)
        _print_files(console, "would restore" if dry_run else "restored", result)
        console.emit({"dry_run": dry_run, **result})


def _switch(on: bool, json: bool, debug: bool, dry_run: bool) -> None:
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import sglang_extension

        result = sglang_extension.set_enabled(on, dry_run=dry_run)
        state = "enabled" if on else "disabled"
        already = "" if result["changed"] else ", as it was"
        console.print(f"{'would be ' if dry_run else ''}{state}{already}: {result['file']}")
        console.emit({"dry_run": dry_run, **result})


def _print_files(console: Console, verb: str, result: dict[str, Any]) -> None:
    for file in result["files"]:
        console.print(f"{verb} {file}")
