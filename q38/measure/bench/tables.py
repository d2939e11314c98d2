"""A result as tables and sentences, the same for the terminal, Markdown and the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from q38.base.units import format_bytes
from q38.measure.bench.plan import cell_name

Value = float | int | str | None


@dataclass(frozen=True)
class Table:
    """Column names, and rows of as many values."""

    columns: list[str]
    rows: list[list[Value]]

    def texts(self) -> list[list[str]]:
        """Rows as a reader wants them: four significant digits, thousands apart."""
        return [[number(v) for v in row] for row in self.rows]


def cell_table(result: Mapping[str, Any]) -> Table:
    """One row a cell. Columns that would say nothing are left out."""
    cells = result["cells"]
    several = any(c["concurrency"] > 1 for c in cells)
    columns: list[tuple[str, Callable[[Mapping[str, Any]], Value], bool]] = [
        ("depth", lambda c: c["depth"], True),
        ("at once", lambda c: c["concurrency"], several),
        ("prefix", lambda c: c["prefix"], len({c["prefix"] for c in cells}) > 1),
        ("prompt tokens", lambda c: c["prompt_tokens"], True),
        ("cached", lambda c: c["cached_tokens"], any(c["cached_tokens"] for c in cells)),
        ("first token s", lambda c: c["first_token_s"]["p50"], True),
        ("prefill tok/s", lambda c: c["prefill_tokens_per_s"], True),
        ("decode tok/s", lambda c: c["decode_tokens_per_s"], True),
        ("ms/token p50", lambda c: _between(c, "p50"), True),
        ("p90", lambda c: _between(c, "p90"), True),
        ("p99", lambda c: _between(c, "p99"), True),
        ("last token s", lambda c: c["last_token_s"]["p50"], True),
        ("all output tok/s", lambda c: c["output_tokens_per_s"], several),
    ]
    for name, key, factor in (
        ("prefix hits %", "prefix_hit_rate", 100),
        ("expert hits %", "expert_hit_rate", 100),
        ("link GB/s", "host_link_gb_per_s", 1),
        ("expert VRAM GB/s", "gpu_expert_gb_per_s", 1),
        ("n-gram hits %", "ngram_hit_rate", 100),
    ):
        there = any(key in c["server"] for c in cells)
        columns.append((name, _server_value(key, factor), there))
    kept = [(name, value) for name, value, wanted in columns if wanted]
    return Table([n for n, _ in kept], [[_mark(c, n, _whole(value(c))) for n, value in kept] for c in cells])


def comparison_table(comparison: Mapping[str, Any]) -> Table:
    """One row for each ratio."""
    rows: list[list[Value]] = [
        [r["cell"], r["speed"], r["ratio"], f"{r['low']:.3f} to {r['high']:.3f}", r["verdict"]]
        for r in comparison["rows"]
    ]
    return Table(["cell", "speed", "new / old", "interval", "verdict"], rows)


def notes(result: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    found = []
    if result["failed"]:
        found.append(f"INCOMPLETE: {result['failed']['cell']}: {result['failed']['what']}.")
    cells = result["cells"]
    unsteady = [_name(c) for c in cells if not c["warmup"]["steady"]]
    if unsteady:
        within = result["settings"]["steady_within"] - 1
        found.append(
            f"Not steady: no two warm-up rounds in a row within {within:.0%} ({'; '.join(unsteady)})."
        )
    bundled = [c for c in cells if c["counted"] != "one a piece" and c["tokens_per_piece"] > 1.05]
    if any(c["counted"] == "by the server" for c in bundled):
        found.append(
            "Pieces of several tokens, counted by the server: the tokens of one share its time evenly."
        )
    if any(c["counted"] in ("on average", "mixed") for c in bundled):
        most = max(c["tokens_per_piece"] for c in bundled)
        found.append(
            f"Pieces of up to {most:.2f} tokens on average, and the server does not count along: times between tokens are "
            "times between pieces divided by that mean, so their percentiles are those of pieces."
        )
    if result["settings"] and not result["settings"]["ignore_eos"]:
        found.append("The server has no ignore_eos: answers may end early.")
    for side, one in (("", result), ("The other server: ", result.get("rival") or {"cells": []})):
        short = [
            _name(c)
            for c in one["cells"]
            if result["settings"] and c["completion_tokens"] < result["settings"]["max_tokens"]
        ]
        if short:
            found.append(f"{side}answers ended before --max-tokens in {'; '.join(short)}.")
    machine = result["machine"]
    if machine["runs_the_server"] and machine["load"] > machine["cores"] / 2:
        found.append(
            f"The machine was busy before it began: load {machine['load']:g} on {machine['cores']} cores."
        )
    return found


def verdict_line(comparison: Mapping[str, Any]) -> str:
    """The comparison in one sentence."""
    gate, rows = comparison["gate"], comparison["rows"]
    mine = [r for r in rows if r["verdict"] == comparison["verdict"]]
    told = [f"{r['speed']} at {r['cell']} {r['ratio']:.3f} ({r['low']:.3f} to {r['high']:.3f})" for r in mine]
    if comparison["verdict"] == "slower":
        return f"slower than the gate of {gate:g}: {'; '.join(told)}"
    if comparison["verdict"] == "undecided":
        return f"undecided, more --repeats narrow it: the gate of {gate:g} is inside {'; '.join(told)}"
    return f"not slower: every interval lies at or above {gate:g}"


def ran_on(result: Mapping[str, Any]) -> str:
    """Server and machine in one sentence."""
    server, machine = result["server"], result["machine"]
    about = [str(server[k]) for k in ("engine", "owned_by") if server.get(k)][:1]
    about += [f"{k} {v}" for k, v in server["reports"].items()]
    text = f"{server['model']} at {server['url']}" + (f" ({', '.join(about)})" if about else "")
    where = "on this machine" if machine["runs_the_server"] else "elsewhere; asked from this machine"
    gpus = ", ".join(f"{g['name']} {format_bytes(g['memory_total'])}" for g in machine["gpus"]) or "no GPU"
    memory = format_bytes(machine["memory_total"])
    return f"{text}, {where}: {machine['cpu']}, {machine['cores']} cores, {memory}, {gpus}."


def number(value: Value) -> str:
    """Four significant digits; a dash for what is unknown."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def _name(cell: Mapping[str, Any]) -> str:
    return cell_name(cell["depth"], cell["concurrency"], cell["prefix"])


def _between(cell: Mapping[str, Any], key: str) -> Value:
    times = cell["between_tokens_ms"]
    return times[key] if times else None


def _server_value(key: str, factor: float) -> Callable[[Mapping[str, Any]], Value]:
    return lambda c: factor * c["server"][key] if key in c["server"] else None


def _whole(value: Value) -> Value:
    """Large numbers without their fraction."""
    return round(value) if isinstance(value, float) and abs(value) >= 1000 else value


def _mark(cell: Mapping[str, Any], column: str, value: Value) -> Value:
    """An unfinished cell is told by its first column."""
    return f"{value:,} (unfinished)" if column == "depth" and not cell["complete"] else value


def markdown(table: Table) -> str:
    """As a Markdown table; numbers to the right."""
    texts = table.texts()
    right = [all(not isinstance(r[i], str) for r in table.rows) for i in range(len(table.columns))]
    rule = ["---:" if r else "---" for r in right]
    lines: Sequence[Sequence[str]] = [table.columns, rule, *texts]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"
