"""q38 doctor: what this machine has and lacks for each verb."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from q38.base.errors import InputError
from q38.cli.app import app
from q38.cli.console import Console, DebugFlag, JsonFlag, session

if TYPE_CHECKING:
    from q38.serving.doctor import Finding, Report
    from q38.serving.machine import Machine


@app.command("doctor")
def doctor(
    require: Annotated[
        str | None,
        typer.Option(
            "--require",
            metavar="VERB",
            help="Exit with code 3 if this verb lacks something here.",
            show_default=False,
        ),
    ] = None,
    path: Annotated[
        Path | None,
        typer.Option(
            help="File or directory whose disk is looked at; default: the current directory.",
            show_default=False,
        ),
    ] = None,
    ple: Annotated[
        Path | None,
        typer.Option(
            help="Directory of a split n-gram table: read random rows of it for a second and say what its disk allows.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            help="With --ple: directory whose config.json says how many rows a token takes; default: the table's "
            "parent, else the release.",
            show_default=False,
        ),
    ] = None,
    json: JsonFlag = False,
    debug: DebugFlag = False,
) -> None:
    """Print what this machine has and lacks for each verb, with the remedy beside each lack.

    A lack is not an error: the exit code is 0 unless --require names a verb that cannot run.
    """
    with session(json_mode=json, debug=debug) as console:
        from q38.serving import doctor as checks

        if model is not None and ple is None:
            raise InputError("is for --ple", where="--model", remedy="give both, or neither")
        report = checks.examine(path)
        if require is not None:
            checks.require(report, require)
        _print_machine(console, report.machine)
        console.print()
        verbs = [verb for verb in report.verbs if require in (None, verb)]
        console.table(("verb", "state", "has"), [_verb_row(report, verb) for verb in verbs])
        _print_lacks(console, report, verbs)
        probed = None if ple is None else _probe(console, ple, model)
        console.emit({**report.to_dict(), **({"ple": probed} if probed else {})})


def _probe(console: Console, directory: Path, model: Path | None) -> dict[str, Any]:
    from q38.ple.probe import probe_table, rows_per_token

    found = probe_table(directory, rows_per_token=rows_per_token(directory, model))
    how = f"{found.depth} at a time, past the page cache" if found.direct else "through the page cache"
    console.print(
        f"\nn-gram table: {found.iops:,.0f} random rows/s ({how}), enough for {found.tokens_per_s:,.0f} prompt tokens/s; "
        f"one row alone {found.p50_ms:.3f} ms (p99 {found.p99_ms:.3f}), the {found.rows_per_token} rows of a token "
        f"{found.step_ms:.3f} ms"
    )
    if found.sparse:
        console.print("advice: the file has holes, which no disk is asked for: these rates mean nothing")
    return found.to_dict()


def _verb_row(report: Report, verb: str) -> tuple[str, str, str]:
    lacks = report.lacks(verb)
    # What every verb needs, and the machine itself, are in the table above.
    has = dict.fromkeys(f.short for f in report.verbs[verb] if f.ok and not f.core and not f.advice)
    return verb, f"lacks {len(lacks)}" if lacks else "ready", ", ".join(has)


def _print_lacks(console: Console, report: Report, verbs: list[str]) -> None:
    """Each lack once, with the verbs it stops and its remedy."""
    missing: dict[Finding, list[str]] = {}
    for verb in verbs:
        for finding in report.verbs[verb]:
            if not finding.ok:
                missing.setdefault(finding, []).append(verb)
    for finding, where in missing.items():
        console.print(f"\n{'advice' if finding.advice else 'lacks'}: {finding.need}, found {finding.found}")
        console.print(f"  for: {', '.join(where)}")
        console.print(f"  remedy: {finding.remedy}")


def _print_machine(console: Console, machine: Machine) -> None:
    from q38.base.units import format_bytes

    limit, lock = machine.cgroup_limit, machine.memlock
    disk = machine.disk
    rows = [
        ("system", machine.system),
        ("cpu", f"{machine.cpu}, {machine.cores} cores for this process"),
        (
            "memory",
            f"{format_bytes(machine.memory_total)}, {format_bytes(machine.memory_available)} available",
        ),
        ("cgroup limit", "none" if limit is None else format_bytes(limit)),
        ("swap", f"{format_bytes(machine.swap_total)}, {format_bytes(machine.swap_free)} free"),
        ("locked memory", "unlimited" if lock is None else format_bytes(lock)),
        (
            "disk",
            f"{disk.kind} ({disk.device or disk.filesystem}), {format_bytes(disk.free)} free at {disk.path}",
        ),
        ("python", machine.python),
        *((name, version or "absent") for name, version in machine.packages.items()),
    ]
    if not machine.gpus:
        rows.insert(2, ("gpu", "none"))
    for i, gpu in enumerate(machine.gpus):
        memory = f"{format_bytes(gpu.memory_free)} of {format_bytes(gpu.memory_total)} free"
        text = (
            f"{gpu.name}, compute capability {gpu.compute_capability}, {memory}, PCIe {gpu.pcie or 'unknown'}"
        )
        rows.insert(2 + i, (f"gpu {i}", f"{text}, driver {gpu.driver}"))
    console.table(("this machine", ""), rows)
